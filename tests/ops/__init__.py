"""The operators on the CPU, and the C++ below them."""
