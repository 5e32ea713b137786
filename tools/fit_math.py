"""Print the coefficients of csrc/cpu/math.hpp and slopes.hpp, fitted anew (numpy, scipy).

    python tools/fit_math.py
    python tools/fit_math.py gelu > csrc/cpu/gelu_table.inc
    python tools/fit_math.py gelu_slope > csrc/cpu/gelu_slope_table.inc
    python tools/fit_math.py gelu_short > csrc/cpu/gelu_short_table.inc

Each is a weighted least-squares fit whose weights are raised where the error is largest (Lawson's
iteration), which ends close to the minimax polynomial. Coefficients come lowest power first,
rounded to fp32.
"""

import sys

import numpy as np
from scipy.special import erf, erfc

NODES = np.cos((np.arange(3000) + 0.5) * np.pi / 3000)  # Chebyshev nodes: dense at both ends


def fit(x, powers, target, weight):
    """The largest |error| * weight, flattened, of sum c[i] x**powers[i] ~ target; and c."""
    basis = x[:, None] ** np.array(powers)
    emphasis, best = np.ones_like(x), None
    for _ in range(200):
        w = np.sqrt(emphasis) * weight
        c, *_ = np.linalg.lstsq(basis * w[:, None], target * w, rcond=None)
        error = np.abs(basis @ c - target) * weight
        if best is None or error.max() < best[0]:
            best = error.max(), c
        emphasis *= error / error.max() + 1e-4
        emphasis /= emphasis.sum()
    return best


def show(name, error_and_c):
    error, c = error_and_c
    print(f"{name}: error {error:.1e}, c = {[float(np.float32(a)) for a in c]}")


def quartics(name, target) -> None:
    """A function on 32 intervals of [0, 6): a quartic of the place in the interval for each."""
    u = (NODES + 1) / 2
    rows = [
        np.polynomial.Chebyshev.fit(u, target((i + u) * 6 / 32), 4, [0, 1]).convert(
            kind=np.polynomial.Polynomial
        )
        for i in range(32)
    ]
    table = np.array([row.coef for row in rows])
    table[0, 0] = target(0.0) + 0.0  # exactly; a fit has 2e-9
    print(f"// {name}, t in [0, 6): coefficients of u^0 .. u^4 on 32 intervals (fit_math.py)")
    show_table(table)


def show_table(table) -> None:
    """Rows of 32 intervals, one for each power."""
    for coefficients in table.T:
        print("{")
        for four in coefficients.reshape(8, 4):
            print("    " + ", ".join(f"{float(np.float32(c))!r}f" for c in four) + ",")
        print("},")


def gelu_short() -> None:
    """t / 2 - t Phi(-t): a parabola of t within half a step of each of 31 places, then t / 2."""
    step = 4.6 / 30.5
    table = [(0, 0, 0)] * 31 + [(0, 0.5, 0)]
    for i in range(31):
        begin, end = max(0, i - 0.5) * step, (i + 0.5) * step
        t = begin + (NODES + 1) / 2 * (end - begin)
        powers = range(0 if i else 1, 3)  # nothing at 0, exactly
        _, c = fit(t, powers, t / 2 - t * tail(t), 1)
        table[i] = (*[0] * (3 - len(c)), *c)
    print("// t / 2 - t Phi(-t): coefficients of t^0 .. t^2 near i * 4.6 / 30.5 (fit_math.py)")
    show_table(np.array(table))


def tail(t):
    """Phi(-t)"""
    return erfc(t / np.sqrt(2)) / 2


def main() -> None:
    if sys.argv[1:] == ["gelu"]:
        return quartics("-t Phi(-t)", lambda t: -t * tail(t))
    if sys.argv[1:] == ["gelu_short"]:
        return gelu_short()
    if sys.argv[1:] == ["gelu_slope"]:
        density = 1 / np.sqrt(2 * np.pi)
        return quartics("Phi(-t) - t phi(t)", lambda t: tail(t) - t * density * np.exp(-t * t / 2))
    r = NODES * np.log(2) / 2 * 1.0001
    show("exp(r) - 1 - r, powers 2..6 of r", fit(r, range(2, 7), np.exp(r) - 1 - r, 1 / np.exp(r)))
    r = NODES / 2 * 1.0001
    show("2^r - 1, powers 1..6 of r", fit(r, range(1, 7), np.exp2(r) - 1, 1 / np.exp2(r)))

    f = (NODES + 1) / 2
    show("2^f below 1, for bf16, powers 0..3 of f", fit(f, range(4), np.exp2(f), 1 / np.exp2(f)))

    t = (NODES + 1) / 2 * 0.925**2 + 1e-12
    y = erf(np.sqrt(t)) / np.sqrt(t)
    show("erf(x) / x - 1 below 0.925, powers 0..5 of x^2", fit(t, range(6), y - 1, 1 / y))

    x = (NODES + 1) / 2 * (4.0 - 0.924) + 0.924
    show(
        "-log(1 - erf(x)) up to 4, powers 0..6 of x",
        fit(x, range(7), -np.log(erfc(x)), erfc(x) / erf(x)),
    )

    t = (NODES + 1) / 2 * 0.65**2 + 1e-12
    y = np.tanh(np.sqrt(t)) / np.sqrt(t)
    show("tanh(x) / x - 1 below 0.65, powers 1..5 of x^2", fit(t, range(1, 6), y - 1, 1 / y))

    a = (NODES + 1) * 3
    t, e = 1 / (1 + 0.35 * a), np.exp(-a * a / 2)
    show(
        "Phi(-a) / e^(-a^2 / 2), powers 1..7 of t", fit(t, range(1, 8), erfc(a / 2**0.5) / 2 / e, e)
    )


if __name__ == "__main__":
    main()
