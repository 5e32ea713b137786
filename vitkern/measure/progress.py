"""How far a long command is: a bar on a terminal that has tqdm, else a line now and then."""

from __future__ import annotations

import sys
import time

SECONDS_BETWEEN_LINES = 15


class Progress:
    """Called with (done, total, the newest); to be used in a `with`, which closes the bar."""

    def __init__(self, unit: str, already: int | None = None) -> None:
        self.unit, self.bar = unit, None
        self.begin = self.said = time.perf_counter()
        self.called = False
        self.already = already  # done before the first call; None: all but one of what it says

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, done: int, total: int, newest: str) -> None:
        if self.already is None:
            self.already = done - 1
        if not self.called:
            self.called = True
            self._open(total)
        if self.bar is not None:
            self.bar.set_postfix_str(newest, refresh=False)
            self.bar.update(done - self.bar.n)
        elif time.perf_counter() - self.said > SECONDS_BETWEEN_LINES or done == total:
            self.said = time.perf_counter()
            each = (self.said - self.begin) / (done - self.already)
            left = (total - done) * each / 60
            pace = f"{each:.2f} s each" if each > 0.2 else f"{1 / each:,.0f} a second"
            print(
                f"{done}/{total} {self.unit}, {pace}, {left:.0f} min left ({newest})",
                file=sys.stderr,
                flush=True,
            )

    def _open(self, total: int) -> None:
        if not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self.bar = tqdm(total=total, initial=self.already, unit=self.unit.removesuffix("s"))
