"""Timing, facts about the machine, charts: what the commands and the benchmarks measure with."""
