"""Fits measured times and memory to the forms that a profile holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from hotspa_plugin.cost.micro_batch import MicroBatchCost

SHORTEST_TOKENS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Activations of micro-batches of so many tokens: ``fixed_bytes + bytes_per_token * tokens``."""

    fixed_bytes: float
    bytes_per_token: float

    def predict(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.fixed_bytes + self.bytes_per_token * np.asarray(tokens, dtype=np.float64)


def fit_time(lengths: Sequence[int], seconds: Sequence[float]) -> MicroBatchCost:
    """``a * s^2 + b * s + c`` with no negative coefficient and the least squared *relative* error.

    Lengths in tokens, at least two different ones. ValueError where a time is not positive.
    """
    s, t = np.asarray(lengths, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if len(np.unique(s)) < 2 or not np.all(t > 0):
        raise ValueError(
            f"times {list(seconds)} of lengths {list(lengths)}: a fit needs two lengths and positive times"
        )
    # columns of like size, so that the solver's tolerance means the same for all
    scale = np.array([s.max() ** 2, s.max(), 1.0])
    matrix = np.stack([s**2, s, np.ones_like(s)], axis=1) / scale
    coefficients, _ = nnls(matrix / t[:, None], np.ones_like(t))
    a, b, c = coefficients / scale
    return MicroBatchCost(a_s_per_token2=float(a), b_s_per_token=float(b), c_s=float(c))


def measured_lengths(longest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(lengths to fit, lengths to try the fit on), in multiples of 16 tokens from about ``SHORTEST_TOKENS`` up."""
    shortest = min(SHORTEST_TOKENS, longest // 4)
    points = [round(shortest * (longest / shortest) ** (i / 6) / 16) * 16 or 16 for i in range(7)]
    return tuple(sorted({*points[::2], longest})), tuple(sorted({*points[1::2]} - {*points[::2], longest}))


def time_error(cost: MicroBatchCost, lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Median relative error of the predictions."""
    predicted = np.array([cost.packed_s([length]) for length in lengths])
    return float(np.median(np.abs(predicted / np.asarray(seconds) - 1)))


def fit_memory(tokens: Sequence[int], num_bytes: Sequence[float]) -> MemoryLine:
    """A line with a slope over 0 and no negative start."""
    x, y = np.asarray(tokens, dtype=np.float64), np.asarray(num_bytes, dtype=np.float64)
    matrix = np.stack([np.ones_like(x), x / x.max()], axis=1)
    # Memory is planned for at the top: large ones must be right, small ones come along.
    coefficients, _ = nnls(matrix, y)
    return MemoryLine(fixed_bytes=float(coefficients[0]), bytes_per_token=max(float(coefficients[1] / x.max()), 1.0))


def memory_error(
    line: MemoryLine, tokens: Sequence[int], num_bytes: Sequence[float], *, resident_bytes: float
) -> float:
    """Largest relative error of a rank's whole memory, of which ``resident_bytes`` are known beforehand."""
    measured = np.asarray(num_bytes, dtype=np.float64) + resident_bytes
    return float(np.max(np.abs((line.predict(tokens) + resident_bytes) / measured - 1)))
