"""What stands in for hardware and libraries in the tests, each with its own tests beside it."""
