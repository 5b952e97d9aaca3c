"""Clock, cores, processor, memory limits and cache folders of this machine, and the environment of child processes."""
