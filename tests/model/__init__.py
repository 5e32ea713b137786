"""The model on all of its paths."""
