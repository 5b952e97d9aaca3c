"""Scripts that measure the pipeline on special hardware. Not part of the installed package."""
