"""Tensors of a layout to vitkern's and back, by the layout's table; a report of what misfits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import ViTConfig
from .layouts.base import Checkpoint, Layout, Refused, Rule, Shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHOWN = 5  # names of each kind in an error
HEADS = ("head.", "head_norm.", "head_dist.", "pre_logits.")  # vitkern's own


@dataclass
class Report:
    """How a checkpoint fits the model that was made of it; names are the checkpoint's own."""

    layout: str  # as a reader knows it
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)  # name: what it is and what was expected
    ignored: list[str] = field(default_factory=list)  # known, and of no use for inference
    absent: list[str] = field(default_factory=list)  # vitkern's parameters that got no value

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.wrong)

    def __str__(self) -> str:
        if self.fits:
            return f"{self.layout}: everything fits"
        lines = [f"nearest layout: {self.layout}"]
        wrong = [f"{name} {why}" for name, why in self.wrong.items()]
        for what, names in (
            ("missing", self.missing), ("unexpected", self.unexpected), ("wrong shape", wrong),
        ):  # fmt: skip
            if names:
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                shown = ", ".join(f"{name:.120}" for name in names[:SHOWN])
                lines.append(f"{what} ({len(names)}): {shown}{more}")
        return "; ".join(lines)


def read(
    layout: Layout,
    c: Checkpoint,
    prefix: str,
    config: ViTConfig,
    wanted: Mapping[str, Shape],
    headless: bool,
) -> tuple[dict[str, Tensor], Report]:
    """vitkern's tensors out of a bare checkpoint, each of the wanted shape.

    headless: what is the layout's head is left out, and not unexpected.
    """
    report, state = Report(layout.title), {}
    used: set[tuple[bool, str]] = set()
    rules = _by_ours(layout.expanded(config))
    for ours, shape in wanted.items():
        if ours not in rules and layout.own_names:
            rules[ours] = [Rule(ours, (ours,))]
        rule = _present(rules.get(ours, []), c)
        if rule is None:
            first = rules[ours][0] if ours in rules else Rule(ours, (ours,))
            names = [n for n in first.theirs if n not in _side(c, first)] or [ours]
            report.missing += [n if first.outside else prefix + n for n in names]
            report.absent.append(ours)
            continue
        parts = [_side(c, rule)[name] for name in rule.theirs]
        used |= {(rule.outside and bool(prefix), name) for name in rule.theirs}
        name = rule.theirs[0] if rule.theirs else ours
        name = name if rule.outside else prefix + name
        tensor, why = _joined(rule, parts, shape)
        if tensor is None:
            report.wrong[name] = why
            report.absent.append(ours)
        else:
            state[ours] = tensor
    for outside, side in ((False, c.tensors), (True, c.outside if prefix else {})):
        for name in side:
            if (outside, name) in used:
                continue
            known = layout.is_ignored(name, outside) or (
                not prefix and layout.is_ignored(name, True)
            )
            known = known or (headless and re.match(layout.head, name) is not None)
            full = name if outside else prefix + name
            (report.ignored if known else report.unexpected).append(full)
    return state, report


def write(layout: Layout, state: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """A layout's tensors out of vitkern's; a `Refused` where it cannot hold them."""
    prefix, written = layout.export_prefix(config), {}
    rules = _by_ours(layout.expanded(config))
    for ours, tensor in state.items():
        if ours not in rules and not layout.own_names:
            raise Refused(f"it has no place for {ours}")
        rule = rules[ours][0] if ours in rules else Rule(ours, (ours,))
        for name, part in zip(rule.theirs, rule.split(tensor), strict=False):
            if part is not None:
                written[name if rule.outside else prefix + name] = part.contiguous()
    zeros = layout.export_zeros(config).items()
    return written | {prefix + name: torch.zeros(shape) for name, shape in zeros}


def _by_ours(rules: Iterable[Rule]) -> dict[str, list[Rule]]:
    """The rules of each parameter; the first is the one to export by."""
    found: dict[str, list[Rule]] = {}
    for rule in rules:
        found.setdefault(rule.ours, []).append(rule)
    return found


def _side(c: Checkpoint, rule: Rule) -> Mapping[str, Tensor]:
    return c.outside if rule.outside else c.tensors


def _present(rules: Iterable[Rule], c: Checkpoint) -> Rule | None:
    """The first rule whose tensors are all there."""
    return next((r for r in rules if all(name in _side(c, r) for name in r.theirs)), None)


def _joined(rule: Rule, parts: list[Tensor], shape: Shape) -> tuple[Tensor | None, str]:
    """Our tensor, or None and why not."""
    odd = [part for part in parts if part.dtype not in DTYPES]
    if odd:
        return None, f"is {str(odd[0].dtype).removeprefix('torch.')}, expected floating point"
    try:
        tensor = rule.join(parts, shape)
    except (RuntimeError, IndexError, ValueError):  # torch's words for shapes that do not fit
        tensor = None
    if tensor is None or tuple(tensor.shape) != shape:
        found = ", ".join(str(tuple(part.shape)) for part in parts)
        return None, f"has shape {found}, {rule.ours} needs {shape}"
    return tensor, ""
