"""Engines: snapshots of a model's weights that run a whole forward in one call, on CPU and GPU."""


class Unpackable(ValueError):
    """Weights that an engine cannot pack, and why."""
