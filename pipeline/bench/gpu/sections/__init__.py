"""The sections of the GPU session, one module each, with a function `run`: each runs in a process of its own and keeps
what it finds in its result as it goes."""
