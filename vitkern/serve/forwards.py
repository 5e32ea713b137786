"""What a batch of requests asks of the model: probabilities, embeddings, attention.

An image's results have the bits that it gets alone. `forward_packed` promises that of the model;
what comes after it (softmax, pooling, rollout) is computed image by image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import accelerate
from ..inspection import rollout
from ..predictor import Predictor

if TYPE_CHECKING:
    from ..model import ViT

POOLS = ("token", "mean")


class Work(NamedTuple):
    """An image (3, Y, X) as the model takes it, and what is wanted of it."""

    pixels: Tensor
    pool: str = ""  # of POOLS: an embedding; "": probabilities
    attention: bool = False


class Answer(NamedTuple):
    """Probabilities (classes,) or an embedding (D,); attention (y, x), whose largest is 1."""

    row: Tensor
    attention: Tensor | None = None


class BadWeights(ValueError):
    """The model answers what is no number."""


class Forwards:
    """Calls a predictor's model for batches; `threads` is the number that a call uses."""

    def __init__(self, predictor: Predictor, threads: int | None = None) -> None:
        if predictor.model.config.pool == "none":
            raise ValueError(
                f"{predictor.source}: the model answers with a row for every token (pool='none');"
                " serving needs one answer an image: load it with another pool"
            )
        self.predictor, self.threads = predictor, threads
        self._looking: ViT | None = None  # the model whose attention is shown
        self.attention_refusal = self._try_attention()

    @property
    def pools(self) -> tuple[str, ...]:
        """How this model's tokens can be pooled, its own way first."""
        c = self.predictor.model.config
        known = POOLS if c.class_token else ("mean",)
        return tuple(sorted(known, key=lambda pool: pool != c.pool))

    def begin(self) -> None:
        """On the thread that will call: OpenMP's number of threads belongs to each thread."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        named = [Work(self._blank())] if self.predictor.names else []
        self([*named, Work(self._blank(), self.pools[0])])  # packs the weights

    @torch.inference_mode()
    def __call__(self, works: Sequence[Work]) -> list[Answer | Exception]:
        """An answer for each, in order, or the exception that is one's own."""
        model = self.predictor.model
        found: dict[int, Tensor] = {}
        for features in (False, True):
            own = [i for i, work in enumerate(works) if bool(work.pool) == features]
            if own:
                rows = model.forward_packed([works[i].pixels for i in own], features=features)
                found.update(zip(own, rows, strict=True))
        return [self._answer(work, found[i]) for i, work in enumerate(works)]

    def _answer(self, work: Work, rows: Tensor) -> Answer | Exception:
        row = self._pooled(rows, work.pool) if work.pool else rows.float().softmax(-1)
        if not row.isfinite().all():
            return BadWeights("the model answers NaN or Inf: its weights are bad")
        try:
            return Answer(row, self._attention(work.pixels) if work.attention else None)
        except (ValueError, RuntimeError) as error:
            return error

    def _pooled(self, tokens: Tensor, pool: str) -> Tensor:
        """What the head would see (D,) of tokens (S, D), pooled in this way."""
        model = self.predictor.model
        one = tokens[0] if pool == "token" else tokens[model.config.prefix_tokens :].mean(0)
        return model.fc_norm(one[None])[0].float()

    def _attention(self, pixels: Tensor) -> Tensor:
        if self._looking is None:
            # Rows between blocks are the fused operators', which have no int8; weights are shared.
            model = self.predictor.model
            self._looking = accelerate(model) if model.precision == "int8" else model
        return rollout(self._looking, pixels[None])[0].float()

    def _blank(self) -> Tensor:
        return torch.zeros(3, *self.predictor.model.config.pixels)

    def _try_attention(self) -> str:
        """Why this model shows no attention ("": it does), as packed weights alone cannot."""
        try:
            with torch.inference_mode():
                self._attention(self._blank())
        except (ValueError, RuntimeError) as error:
            return str(error)
        return ""


def normalised(row: Tensor) -> Tensor:
    """The same direction with length 1."""
    return F.normalize(row, dim=-1)
