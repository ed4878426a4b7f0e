"""Dividing a bucket's sequences among replicas and micro-batches so that the slowest replica is as fast as possible.

The heuristics of record, then a short local search: longest processing time first (Graham 1969) over replicas, best
fit decreasing into micro-batches. All choices break ties by index and stop after a fixed number of trials, so that
every rank finds the same answer. A *grouping* below is ``grouping[replica][micro_batch]``, a list of indices.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.cost.micro_batch import MicroBatchCost, pipeline_s

Grouping = list[list[list[int]]]

RELATIVE_GAP = 1e-3  # the search ends this close to the lower bound
MIN_TRIALS = 16
TRIAL_SEQUENCES = 4096  # the search repacks about this many sequences at most, which bounds its time


def longest_first(costs_s: Sequence[float] | np.ndarray, num_parts: int) -> list[list[int]]:
    """Divides items into ``num_parts`` lists, each item in turn, dearest first, to the part with the least so far."""
    costs_s = np.asarray(costs_s, dtype=np.float64)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, 0, part) for part in range(num_parts)]
    for item in np.argsort(-costs_s, kind="stable").tolist():
        total_s, num_items, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (total_s + float(costs_s[item]), num_items + 1, part))
    return parts


def best_fit_decreasing(items: Sequence[int], lengths: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Packs items into few bins: each, longest first, into the fullest bin that still has room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending
    for item in sorted(items, key=lambda item: (-lengths[item], item)):
        place = bisect.bisect_left(room, (lengths[item], -1))
        if place == len(room):
            bins.append([item])
            bisect.insort(room, (capacity_tokens - lengths[item], len(bins) - 1))
        else:
            free, chosen = room.pop(place)
            bins[chosen].append(item)
            bisect.insort(room, (free - lengths[item], chosen))
    return bins


def _even_bins(
    items: Sequence[int], lengths: Sequence[int], costs_s: Sequence[float], capacity_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Packs items into ``num_bins`` bins of about equal cost, or None where this greedy way finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity_tokens] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for item in sorted(items, key=lambda item: (-costs_s[item], -lengths[item], item)):
        too_full = []
        while heap and room[heap[0][1]] < lengths[item]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        total_s, index = heap[0]
        heapq.heapreplace(heap, (total_s + costs_s[item], index))
        bins[index].append(item)
        room[index] -= lengths[item]
        for entry in too_full:
            heapq.heappush(heap, entry)
    return [members for members in bins if members]


class _Packer:
    """Packs one replica's sequences, and says what that costs."""

    def __init__(self, lengths: np.ndarray, num_stages: int, capacity_tokens: int, cost: MicroBatchCost) -> None:
        self.lengths: list[int] = lengths.tolist()
        self.costs_s: list[float] = cost.sequences_s(lengths).tolist()
        self._num_stages = num_stages
        self._capacity_tokens = capacity_tokens
        self._constant_s = cost.c_s

    def time_s(self, bins: list[list[int]]) -> float:
        return pipeline_s([sum(self.costs_s[i] for i in b) + self._constant_s for b in bins], self._num_stages)

    def pack(self, items: Sequence[int]) -> tuple[float, list[list[int]]]:
        """(seconds, micro-batches) of the best packing tried."""
        if not items:
            return 0.0, []
        fewest = best_fit_decreasing(items, self.lengths, self._capacity_tokens)
        candidates = [fewest]
        counts = {len(fewest), self._fitting_count(items, len(fewest))}
        for num_bins in sorted(counts):
            even = _even_bins(items, self.lengths, self.costs_s, self._capacity_tokens, num_bins)
            if even is not None:
                candidates.insert(0, even)
        times = [self.time_s(bins) for bins in candidates]
        best = min(range(len(times)), key=times.__getitem__)
        return times[best], candidates[best]

    def _fitting_count(self, items: Sequence[int], fewest: int) -> int:
        """How many micro-batches fill this pipeline best.

        With total work Q in m equal micro-batches, ``Q + m*c + (num_stages - 1) * (Q/m + c)`` is least at
        ``m = sqrt((num_stages - 1) * Q / c)``; a single long sequence limits how small the largest can get.
        """
        if self._num_stages == 1:
            return fewest
        work_s = sum(self.costs_s[i] for i in items)
        longest_s = max(self.costs_s[i] for i in items)
        useful = math.ceil(work_s / longest_s) if longest_s > 0 else 1
        if self._constant_s > 0:
            useful = min(useful, round(math.sqrt((self._num_stages - 1) * work_s / self._constant_s)))
        return max(fewest, min(useful, len(items)))


def balance_packed(
    lengths: np.ndarray, *, num_replicas: int, num_stages: int, capacity_tokens: int, cost: MicroBatchCost
) -> Grouping:
    """Packs sequences of ``lengths`` (tokens, each at most the capacity) for ``num_replicas`` replicas."""
    packer = _Packer(lengths, num_stages, capacity_tokens, cost)
    divisions = [longest_first(packer.costs_s, num_replicas)]
    if cost.c_s > 0:
        # where the overhead of a micro-batch counts, dividing whole full micro-batches may need fewer
        bins = best_fit_decreasing(range(len(lengths)), packer.lengths, capacity_tokens)
        bins_s = [sum(packer.costs_s[i] for i in b) + cost.c_s for b in bins]
        divisions.append([[i for b in part for i in bins[b]] for part in longest_first(bins_s, num_replicas)])
    best: list[tuple[float, list[list[int]]]] = []
    for division in divisions:
        packed = [packer.pack(part) for part in division]
        if not best or max(packed)[0] < max(best)[0]:
            best = packed
    fewest_bins = -(-int(lengths.sum()) // capacity_tokens)
    bound_s = max(
        max(packer.costs_s) * num_stages + cost.c_s * num_stages,
        (sum(packer.costs_s) + cost.c_s * fewest_bins) / num_replicas,
    )
    return [bins for _, bins in _improve(best, packer, bound_s)]


def _improve(
    packed: list[tuple[float, list[list[int]]]], packer: _Packer, bound_s: float
) -> list[tuple[float, list[list[int]]]]:
    """Moves or swaps single sequences out of the slowest replica while that helps."""
    num_items = len(packer.costs_s)
    trials = max(MIN_TRIALS, TRIAL_SEQUENCES * len(packed) // (2 * max(num_items, 1)))
    trials = min(trials, 256)
    costs_s = np.array(packer.costs_s + [0.0])  # the last stands for "nothing": a move is a swap with it
    while trials > 0:
        times_s = np.array([time_s for time_s, _ in packed])
        slowest = int(times_s.argmax())
        if times_s[slowest] <= bound_s * (1 + RELATIVE_GAP):
            break
        mine = [i for b in packed[slowest][1] for i in b]
        others, owner = [], []
        for replica, (_, bins) in enumerate(packed):
            if replica != slowest:
                members = [i for b in bins for i in b] + [num_items]
                others += members
                owner += [replica] * len(members)
        if not others:
            break
        owner_of_other = np.array(owner)
        shift_s = costs_s[mine][:, None] - costs_s[others][None, :]
        after_s = np.maximum(times_s[slowest] - shift_s, times_s[owner_of_other][None, :] + shift_s)
        after_s[shift_s <= 0] = np.inf
        order = np.argsort(after_s, axis=None, kind="stable")[:4]
        improved = False
        for flat in order.tolist():
            row, column = divmod(flat, len(others))
            if not np.isfinite(after_s[row, column]) or trials <= 0:
                break
            trials -= 1
            receiver = owner[column]
            given, taken = mine[row], others[column]
            new_mine = [i for i in mine if i != given] + ([taken] if taken < num_items else [])
            theirs = [i for b in packed[receiver][1] for i in b if i != taken] + [given]
            first, second = packer.pack(new_mine), packer.pack(theirs)
            if max(first[0], second[0]) < times_s[slowest] * (1 - 1e-9):
                packed = list(packed)
                packed[slowest], packed[receiver] = first, second
                improved = True
                break
        if not improved:
            break
    return packed


def balance_padded(
    lengths: np.ndarray, *, num_replicas: int, num_stages: int, capacity_tokens: int, cost: MicroBatchCost
) -> Grouping:
    """Groups rows of ``lengths`` into micro-batches with rows times longest within the capacity.

    Rows of similar length share a micro-batch, which keeps padding low. Several sizes of micro-batch are tried, with
    whole micro-batches divided among replicas and with rows divided first.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    row_tokens: list[int] = lengths.tolist()
    rows_s: list[float] = cost.sequences_s(lengths).tolist()
    work_s = sum(rows_s)
    best: Grouping = []
    best_s = math.inf
    divided = [sorted(part, key=lambda i: (-row_tokens[i], i)) for part in longest_first(rows_s, num_replicas)]
    for micro_batches_each in (0, 1, 2, 4, 16, 64, 2 * num_stages):
        limit_s = 1.02 * work_s / (num_replicas * micro_batches_each) if micro_batches_each else math.inf
        groups = _similar_rows(order, row_tokens, rows_s, capacity_tokens, limit_s)
        groups_s = [len(group) * rows_s[group[0]] + cost.c_s for group in groups]
        whole = [[groups[g] for g in part] for part in longest_first(groups_s, num_replicas)]
        rows_first = [_similar_rows(part, row_tokens, rows_s, capacity_tokens, limit_s) for part in divided]
        for grouping in (whole, rows_first):
            slowest_s = max(
                pipeline_s([len(group) * rows_s[group[0]] + cost.c_s for group in replica], num_stages)
                for replica in grouping
            )
            if slowest_s < best_s * (1 - 1e-9):
                best, best_s = grouping, slowest_s
    return best


def _similar_rows(
    order: Sequence[int], row_tokens: Sequence[int], rows_s: Sequence[float], capacity_tokens: int, limit_s: float
) -> list[list[int]]:
    """Cuts rows, given longest first, into runs within the capacity and (one row apart) within ``limit_s``."""
    groups: list[list[int]] = []
    for item in order:
        if groups:
            group = groups[-1]
            num_rows = len(group) + 1
            if num_rows * row_tokens[group[0]] <= capacity_tokens and num_rows * rows_s[group[0]] <= limit_s:
                group.append(item)
                continue
        groups.append([item])
    return groups
