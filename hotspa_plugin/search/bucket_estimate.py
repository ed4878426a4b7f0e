"""A quick estimate of the time that a bucket takes, for all buckets between given cuts at once.

It replaces packing and balancing (``data.balancing``) by their bounds: an even division of the work, micro-batches
filled to the brim, and the longest sequence where that is more. For batches with many sequences it is close; what the
search chooses is priced by the real assignment afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.cost import MicroBatchCost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """What an estimate must know of a strategy: replicas, stages, tokens of a micro-batch, and its cost.

    ``ranks_per_core`` is that of the machine (``cost.profile.MachineFigures``).
    """

    num_replicas: int
    num_stages: int
    capacity_tokens: int
    cost: MicroBatchCost
    ranks_per_core: float = 1.0


class LengthTables:
    """Sums over the lengths of some batches up to each of ``cuts_tokens``, ascending from 0.

    Arrays have shape ``[num_batches, num_cuts]``. A bucket is a pair (low, high) of indices of cuts.
    """

    def __init__(self, batches: Sequence[np.ndarray], cuts_tokens: Sequence[int]) -> None:
        self.cuts_tokens = np.asarray(cuts_tokens, dtype=np.int64)
        assert self.cuts_tokens[0] == 0 and np.all(np.diff(self.cuts_tokens) > 0)
        self._sorted = [np.sort(np.asarray(batch, dtype=np.int64)) for batch in batches]
        # whole numbers: exact in any order
        sums = [np.concatenate([[0], np.cumsum(lengths)]) for lengths in self._sorted]
        squares = [np.concatenate([[0], np.cumsum(lengths * lengths)]) for lengths in self._sorted]
        at = [np.searchsorted(lengths, self.cuts_tokens, side="right") for lengths in self._sorted]
        self.count = np.stack(at)
        self.tokens = np.stack([s[i] for s, i in zip(sums, at, strict=True)])
        self.squares = np.stack([s[i] for s, i in zip(squares, at, strict=True)])
        self.longest = np.stack(
            [np.concatenate([[0], lengths])[i] for lengths, i in zip(self._sorted, at, strict=True)]
        )

    @property
    def num_cuts(self) -> int:
        return len(self.cuts_tokens)

    def bucket_s(self, lane: Lane) -> np.ndarray:
        """Seconds of every bucket under ``lane``: shape ``[num_batches, num_cuts, num_cuts]``, indexed (low, high).

        0 where a bucket is empty, infinite where its longest sequence does not fit.
        """
        high = slice(None), None, slice(None)
        low = slice(None), slice(None), None
        count = self.count[high] - self.count[low]
        tokens = self.tokens[high] - self.tokens[low]
        squares = self.squares[high] - self.squares[low]
        longest = np.broadcast_to(self.longest[high], count.shape)
        half = np.array([np.searchsorted(s, lane.capacity_tokens // 2, side="right") for s in self._sorted])
        num_big = np.maximum(self.count[high] - np.maximum(self.count[low], half[:, None, None]), 0)
        compute_s, bubble_s = estimate_s(count, tokens, squares, longest, num_big, lane)
        seconds = compute_s + bubble_s
        seconds[longest > lane.capacity_tokens] = np.inf
        seconds[count <= 0] = 0.0
        return seconds


def estimate_s(
    count: np.ndarray, tokens: np.ndarray, squares: np.ndarray, longest: np.ndarray, num_big: np.ndarray, lane: Lane
) -> tuple[np.ndarray, np.ndarray]:
    """(compute, bubbles) in seconds of buckets with these counts, sums of lengths and of squares, and longest
    sequences.

    ``num_big`` counts sequences over half a micro-batch, no two of which share one.
    """
    cost, stages = lane.cost, lane.num_stages
    work = cost.a_s_per_token2 * squares + cost.b_s_per_token * tokens
    most = (cost.a_s_per_token2 * longest + cost.b_s_per_token) * longest
    load = np.maximum(work / lane.num_replicas, most)
    each = np.ceil(np.maximum(tokens / max(lane.capacity_tokens, 1), num_big) / lane.num_replicas)
    num = np.maximum(each, 1.0)
    if stages > 1:
        # as data.balancing fills a pipeline: more micro-batches, up to the longest sequence and to what overhead allows
        useful = np.ceil(load / np.maximum(most, 1e-30))
        if cost.c_s > 0:
            useful = np.minimum(useful, np.rint(np.sqrt((stages - 1) * load / cost.c_s)))
        useful = np.minimum(useful, np.ceil(count / lane.num_replicas))
        num = np.maximum(num, useful)
    largest = np.maximum(load / num, most) + cost.c_s
    compute_s, bubble_s = load + num * cost.c_s, (stages - 1) * largest
    if lane.ranks_per_core == 1:
        return compute_s, bubble_s
    # cost.shared_cores_s, for all at once
    mean_work_s = work / lane.num_replicas + num * cost.c_s
    share = np.maximum(1 / lane.ranks_per_core, mean_work_s / (compute_s + bubble_s))
    return compute_s * share, bubble_s * share
