"""Tests by subject: operators, model, GPU, command line, benchmarks, project; and fuzzers."""
