"""How near a hot step comes to its buckets: each one measured alone, under every strategy that can hold it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotspa_plugin.integrations.megatron.bench_train import Contender, TimedStep, entered, random_batch
from hotspa_plugin.integrations.megatron.link_profiling import largest_of_ranks

# Strategies that took so much longer for a bucket than its best one are not tried for that bucket again.
HOPELESS = 1.5


def compute_alone(name: str, number: int, lengths: np.ndarray) -> float:
    """On each rank: seconds of computing these sequences under a contender's one strategy, on the slowest rank."""
    result = entered(name).trainer.accumulate(random_batch(number, lengths))
    return float(largest_of_ranks(result.buckets[0].compute_s))


class BucketsAlone:
    """Measures the buckets of ``hot`` one by one, each under those of ``rivals`` whose bound holds it.

    Rivals are contenders of one strategy each. ``seconds[round]`` is the sum over buckets of the fastest rival's time,
    measured right after the hot step of that round on the same sequences.
    """

    def __init__(self, hot: Contender, rivals: Sequence[Contender]) -> None:
        self.hot, self.rivals = hot, tuple(rivals)
        self.seconds: dict[int, float] = {}
        self._hopeless: set[tuple[int, str]] = set()  # (bucket, rival)

    def measure(self, workers: Any, number: int, lengths: np.ndarray, *, keep: bool = True) -> None:
        """One round; with ``keep`` off it only warms up."""
        total_s = 0.0
        for bucket in self.hot.assigner.assign(lengths).buckets:
            inside = lengths[sorted(i for m in bucket.micro_batches for i in m.samples)]
            taken = {}
            for rival in self.rivals:
                if rival.pool.entries[-1].bound_tokens < inside.max() or (bucket.bucket, rival.name) in self._hopeless:
                    continue
                run = f"{__name__}:compute_alone"
                taken[rival.name] = workers.run(run, name=rival.name, number=number, lengths=inside)[0]
            best_s = min(taken.values())
            if keep:
                self._hopeless |= {(bucket.bucket, name) for name, s in taken.items() if s > HOPELESS * best_s}
            total_s += best_s
        if keep:
            self.seconds[number] = total_s

    def hot_over_alone(self, steps: Sequence[TimedStep]) -> float | None:
        """Hot time without the optimizer, over the buckets alone plus the exposed switches and flushes: the median of
        rounds (``steps`` are those from round 1 on)."""
        ratios = [
            (taken.step_s - taken.optimizer_s) / (self.seconds[number] + taken.switch_s + taken.flush_s)
            for number, taken in enumerate(steps, start=1)
            if number in self.seconds
        ]
        return statistics.median(ratios) if ratios else None
