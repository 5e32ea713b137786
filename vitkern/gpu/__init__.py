"""The GPU backend: Triton kernels, one file per operator, and what starts, builds and checks them.

Nothing here is imported before the first call on a GPU tensor (or by the tests), so that triton
stays an optional dependency.
"""
