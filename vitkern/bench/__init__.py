"""vitkern beside other inference engines on this CPU: each in a process of its own, taking turns,
with the same weights and images, and its error against float64 beside its time.

`vitkern bench` and the published table (benchmarks/cpu) share it.
"""
