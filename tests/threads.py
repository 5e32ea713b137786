"""Threads of tests."""

import threading
from collections.abc import Sequence


def run_together(threads: Sequence[threading.Thread]) -> None:
    """Starts them all, and waits for the last."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
