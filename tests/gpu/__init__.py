"""The GPU kernels, their launcher, their plans and their ahead-of-time build."""
