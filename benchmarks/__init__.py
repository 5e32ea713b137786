"""Run `pytest benchmarks/ --benchmark-only`, then `python -m benchmarks.report`: `make bench`."""
