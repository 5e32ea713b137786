"""The error contract (vitkern/contract.py) applied to operators and whole models on this machine.

`vitkern verify`, `vitkern demo`, the tests and the benchmarks of a GPU share it.
"""
