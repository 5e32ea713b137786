"""nearest: the most similar vectors of a file, by cosine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .vector_files import Vectors


class Neighbour(NamedTuple):
    image: str
    similarity: float  # cosine: 1 is the same direction


def nearest(vectors: Vectors, queries: np.ndarray, top: int = 10) -> list[list[Neighbour]]:
    """For each of the queries (Q, D) the `top` images with the largest cosine, best first.

    Exact: every vector is looked at, a piece of the file at a time. Of equals the first comes
    first.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, not {top}")
    if len(vectors.shape) != 1:
        raise ValueError(
            f"{vectors.path} holds all tokens of an image, {vectors.shape}: a search needs one"
            f" vector each: embed with --tokens cls or mean"
        )
    if queries.ndim != 2 or queries.shape[1:] != vectors.shape:
        raise ValueError(f"queries have shape {queries.shape}, expected (Q, {vectors.shape[0]})")
    wanted = _unit(queries)
    best = np.zeros((len(queries), 0), np.float32)
    where = np.zeros((len(queries), 0), np.int64)
    start = 0
    for rows in vectors:
        found = wanted @ _unit(rows).T  # (Q, n)
        here = np.broadcast_to(np.arange(start, start + len(rows)), found.shape)
        best, where = np.concatenate([best, found], 1), np.concatenate([where, here], 1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :top]
        best, where = np.take_along_axis(best, order, 1), np.take_along_axis(where, order, 1)
        start += len(rows)
    return [
        [Neighbour(vectors.names[i], float(s)) for i, s in zip(row, scores, strict=True)]
        for row, scores in zip(where, best, strict=True)
    ]


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.maximum(lengths, np.finfo(np.float32).tiny)
