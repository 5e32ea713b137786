"""The ahead-of-time build: compiling for GPUs that are not there, and judging the machine code."""
