"""The time of one optimizer step, by what it is spent on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step. Compute and bubbles are those of the slowest replica of each bucket, one after the other."""

    compute_s: float = 0.0
    bubble_s: float = 0.0
    switch_s: float = 0.0
    flush_s: float = 0.0
    reduce_s: float = 0.0  # home's own gradient reduction, where it is not hidden
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(self)})

    def __truediv__(self, count: float) -> StepTime:
        return StepTime(**{f.name: getattr(self, f.name) / count for f in dataclasses.fields(self)})


def exposed_reduce_s(reduce_s: float, *, overlaps: bool, last_micro_batch_s: float) -> float:
    """Seconds left of a reduction that, if it overlaps, starts with the backward (2/3) of the last micro-batch."""
    return max(0.0, reduce_s - last_micro_batch_s * 2 / 3) if overlaps else reduce_s
