"""Engines: snapshots of a model's weights that run a whole forward in one call, on CPU and GPU."""
