"""Weights from elsewhere: one file per foreign layout."""
