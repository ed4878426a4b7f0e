"""Time of one micro-batch on one pipeline stage: quadratic per sequence, linear in tokens, constant per micro-batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchCost:
    """Coefficients of ``t = sum(a * s^2 + b * s) + c`` over the sequences s of a micro-batch, in seconds.

    The form is that of Hydraulis (arXiv 2412.07894): attention is quadratic in each sequence (not in the pack), all
    other work is linear in tokens, and a micro-batch has a fixed overhead. Forward and backward together.

    Balancing depends on the ratios only. Those of the defaults are near what was published for LLaMA 7B on A800 (one
    stage of tp1 pp2: a/b = 1.5e-5 per token, c/b = 160 tokens); use measured coefficients where there are any.
    """

    a_s_per_token2: float = 1.5e-10
    b_s_per_token: float = 1e-5
    c_s: float = 1.6e-3

    def __post_init__(self) -> None:
        if min(self.a_s_per_token2, self.b_s_per_token, self.c_s) < 0:
            raise ValueError(f"{self}: coefficients of a cost must not be negative: measure or fit them again")

    def sequences_s(self, lengths: np.ndarray | Sequence[int]) -> np.ndarray:
        """``a * s^2 + b * s`` of each sequence, float64 of the shape of ``lengths`` (tokens)."""
        lengths = np.asarray(lengths, dtype=np.float64)
        return (self.a_s_per_token2 * lengths + self.b_s_per_token) * lengths

    def packed_s(self, lengths: Sequence[int] | np.ndarray) -> float:
        """Seconds of a packed micro-batch of sequences of these lengths."""
        return float(self.sequences_s(lengths).sum()) + self.c_s

    def padded_s(self, num_rows: int, row_tokens: int) -> float:
        """Seconds of ``num_rows`` rows, each padded to ``row_tokens``."""
        return num_rows * float(self.sequences_s([row_tokens])[0]) + self.c_s


def pipeline_s(micro_batches_s: Sequence[float] | np.ndarray, num_stages: int) -> float:
    """Seconds of a pipeline over micro-batches with these stage times: ``sum(t) + (num_stages - 1) * max(t)``.

    Exact for 1F1B with equal micro-batches; the usual estimate otherwise (Hydraulis uses it too). 0 for none.
    """
    if len(micro_batches_s) == 0:
        return 0.0
    return float(sum(micro_batches_s)) + (num_stages - 1) * float(max(micro_batches_s))


def shared_cores_s(slowest_s: float, mean_work_s: float, ranks_per_core: float) -> float:
    """Seconds of a bucket whose slowest replica takes ``slowest_s``, bubbles included, while all ranks are busy.

    ``mean_work_s`` is the work of a replica in the mean, without bubbles. Where ``ranks_per_core`` are more than one, a
    rank that waits leaves its share to the others: bubbles and uneven replicas cost nothing as long as there is other
    work for all cores, and the slowest replica alone runs so many times as fast. With 1 this is ``slowest_s``.
    """
    return max(slowest_s / ranks_per_core, mean_work_s)
