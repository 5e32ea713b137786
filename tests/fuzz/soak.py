"""Minutes of hard work for one process: several threads, changing weights, every result checked.

    python -m tests.fuzz.soak --minutes 5      # make soak

Readers call one shared model while a writer changes its weights, precision and path and torch's
thread count; others train, copy, pickle and drop models of their own. A result must belong to
weights that were valid during its call. Memory must stay flat: after the first 40 % of the time,
the median of the last quarter may be at most 5 % and 24 MB above the median of the first.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import pathlib
import random
import resource
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter

import torch

from tests.model.tiny_models import OPTIONS, tiny

from . import model_changes, models
from .outcome import Wrong, check_close

WARM_UP, GROWTH_SHARE, GROWTH_BYTES = 0.4, 0.05, 24e6
STUCK_SECONDS = 120  # without an answer: a thread waits for ever
STEP, STEPS = 4.0, 8  # a writer adds STEP to every logit, STEPS times, then starts again from 0
SIZES = ((24, 16), (16, 16), (8, 32), (4, 4))


class Shared:
    """One model, and what its results are but for the writer's part.

    The writer only moves the head's bias, by the same amount in every class: each logit tells on
    its own which of the writer's states it saw, even if a forward met a state half written.
    """

    def __init__(self) -> None:
        self.model = tiny(dynamic_image_size=True, layer_scale=0.5, depth=2)
        with torch.no_grad():
            self.model.head.bias.zero_()
        double = tiny(torch.float64, dynamic_image_size=True, layer_scale=0.5, depth=2)
        double.load_state_dict({n: p.double() for n, p in self.model.state_dict().items()})
        double.path = "reference"
        self.images, self.logits = [], []
        g = torch.Generator().manual_seed(7)
        for size in SIZES:
            for B in (1, 2, 5):
                image = torch.randn(B, 3, *size, generator=g)
                with torch.no_grad():
                    self.logits.append(double(image.double()))
                self.images.append(image)
        self.begun = self.done = 0  # states that the writer has begun and finished to write

    def read(self, rng: random.Random) -> None:
        """One forward, whose logits must be of a state between those before and after it."""
        i = rng.randrange(len(self.images))
        first = self.done
        with torch.inference_mode():
            got = self.model(self.images[i]).double() - self.logits[i]
        states = {n % STEPS for n in range(first, self.begun + 1)}
        near = torch.stack([(got - STEP * n).abs() for n in states]).amin(0)
        if not (near < STEP / 4).all():  # NaN is not near, either
            worst = near.nan_to_num(1e30).argmax()
            raise Wrong(
                f"a logit is {got.flatten()[worst]:.3f} above the model's, but the writer had"
                f" added {sorted(STEP * n for n in states)} meanwhile"
            )

    def write(self, rng: random.Random) -> None:
        """Move on to the next state, in one of the ways that users have."""
        bias, value = self.model.head.bias, STEP * ((self.begun + 1) % STEPS)
        self.begun += 1
        way = rng.randrange(5)
        with torch.no_grad():
            if way == 0:
                bias.copy_(torch.full_like(bias, value))
            elif way == 1:
                bias.fill_(value)
            elif way == 2:
                bias.data.fill_(value)
            elif way == 3:
                self.model.head.bias = torch.nn.Parameter(torch.full_like(bias, value))
            else:
                bias.grad = bias.detach() - value  # a step of 1 leads there
                torch.optim.SGD([bias], lr=1.0).step()
                bias.grad = None
        self.done = self.begun

    def unsettle(self, rng: random.Random) -> None:
        """What changes how a result is computed, and not what it is."""
        what = rng.randrange(5)
        if what == 0:
            self.model.precision = rng.choice((None, "fp32", "tf32", "bf16"))
        elif what == 1:
            self.model.path = rng.choice(("auto", "auto", "fused"))
        elif what == 2:
            torch.set_num_threads(rng.choice((1, 2, 3)))
        elif what == 3:
            self.model.repack()
        else:
            gc.collect()


def live(rng: random.Random) -> None:
    """A model's whole life in one thread: made, trained, changed, copied, dropped."""
    options = OPTIONS[rng.choice(list(OPTIONS))]
    model = tiny(seed=rng.randrange(100), **{**options, "depth": min(options.get("depth", 1), 1)})
    model.precision = rng.choice((None, None, "bf16"))
    c = model.config
    image = torch.randn(rng.choice((1, 3)), c.channels, *c.pixels)
    kinds = (model_changes.write, model_changes.optimise, model_changes.convert)
    for _ in range(rng.randrange(4)):
        kind = rng.choice(kinds)
        name, change = kind(rng)
        if kind is model_changes.convert and name not in ("deepcopy", "pickle", "accelerate"):
            continue
        model = change(model) or model
        with torch.no_grad():
            got, truth = model(image), models.references(model, image, "forward")
        if isinstance(truth, Exception):
            raise truth
        try:
            check_close(got, *truth, "logits", models.coarsest(model))
        except Wrong as error:
            raise Wrong(f"after {name}: {error}") from None


class Soak:
    """The threads, what they did and what went wrong."""

    def __init__(self, seed: int, threads: int) -> None:
        self.shared, self.end = Shared(), threading.Event()
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.curve: list[tuple[float, float, int]] = []  # seconds, bytes, forwards
        works = [("forwards", self.shared.read)] * max(1, threads - 2)
        works += [("writes", self._write), ("lives", live)]
        self._threads = [
            threading.Thread(target=self._work, args=(name, work, random.Random(f"{seed} {i}")))
            for i, (name, work) in enumerate(works)
        ]

    def run(self, seconds: float) -> bool:
        """True when every result was right, nothing waited for ever and memory stayed flat."""
        self._warm()
        begin, last = time.monotonic(), 0.0
        for thread in self._threads:
            thread.daemon = True
            thread.start()
        while (now := time.monotonic() - begin) < seconds and not self.failures:
            time.sleep(min(0.25, seconds / 40))
            self.curve.append((now, resident(), self.counts["forwards"]))
            if now - last > max(1.0, seconds / 20):
                last = now
                print(
                    f"  {now:6.0f} s  {summary(self.counts)}  {resident() / 1e6:.0f} MB", flush=True
                )
        self.end.set()
        for thread in self._threads:
            thread.join(STUCK_SECONDS)
            if thread.is_alive():
                self.failures.append(f"a thread hangs:\n{stacks()}")
        growth = grown([size for at, size, _ in self.curve if at > WARM_UP * seconds])
        if growth:
            self.failures.append(growth)
        return not self.failures

    def _warm(self) -> None:
        """What is imported and allocated once: torch's optimizers alone take a second and 60 MB."""
        rng = random.Random(0)
        for precision in (None, "tf32", "bf16"):
            self.shared.model.precision = precision
            for _ in range(2 * len(self.shared.images)):
                self.shared.read(rng)
        self.shared.model.precision = None
        model_changes.optimise(rng)[1](tiny())

    def _work(self, name: str, work, rng: random.Random) -> None:
        try:
            while not self.end.is_set():
                work(rng)
                self.counts[name] += 1
        except Exception as error:
            place = "".join(traceback.format_tb(error.__traceback__)[-2:])
            self.failures.append(f"{name}: {type(error).__name__}: {error}\n{place}")
            self.end.set()

    def _write(self, rng: random.Random) -> None:
        if rng.random() < 0.8:
            self.shared.write(rng)
        else:
            self.shared.unsettle(rng)
        time.sleep(rng.choice((0, 0.001, 0.01)))


def resident() -> float:
    """Bytes of memory that this process holds."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def grown(sizes: list[float]) -> str:
    """ "" while memory is flat, else how much it grew between the first and the last quarter."""
    quarter = len(sizes) // 4
    if not quarter:
        return "too short to judge the memory"
    first, last = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
    if last - first <= GROWTH_SHARE * first + GROWTH_BYTES:
        return ""
    return f"memory grew from {first / 1e6:.0f} to {last / 1e6:.0f} MB"


def sparkline(sizes: list[float], width: int = 60) -> str:
    """The curve in one line, from its smallest to its largest."""
    picked = [sizes[i * len(sizes) // width] for i in range(width)] if sizes else []
    low, high = min(picked, default=0), max(picked, default=0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (s - low) / max(1, high - low))] for s in picked)


def stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()


def summary(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("forwards", "writes", "lives"))


def report(soak: Soak) -> str:
    sizes = [size for _, size, _ in soak.curve]
    lines = [f"memory {sparkline(sizes)} {min(sizes) / 1e6:.0f} to {max(sizes) / 1e6:.0f} MB"]
    lines += [f"FAILED: {failure}" for failure in soak.failures]
    lines.append(f"{'failed' if soak.failures else 'passed'}: {summary(soak.counts)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=4, help="at once (default 4)")
    given = parser.parse_args()
    faulthandler.enable()
    soak = Soak(given.seed, given.threads)
    soak.run(given.minutes * 60)
    print(report(soak))
    return 1 if soak.failures else 0


if __name__ == "__main__":
    sys.exit(main())
