"""Dividing a bucket's sequences among replicas and micro-batches so that the slowest replica is as fast as possible.

The heuristics of record, then a short local search: longest processing time first (Graham 1969) over replicas, best
fit decreasing into micro-batches. Costs are counted in whole units (``_in_units``), so that sums are exact in any
order; choices break ties by index and stop after a fixed number of trials: every rank finds the same answer. A
*grouping* below is ``grouping[replica][micro_batch]``, a list of indices.
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
MIN_TRIALS, MAX_TRIALS = 16, 256
NUM_PROPOSALS = 4  # exchanges tried before the search gives up on a replica
NUM_RECEIVERS = 8
_MAX_BINS = 1 << 24
TRIAL_SEQUENCES = 4096  # the search repacks about this many sequences at most, which bounds its time


def longest_first(costs: Sequence[float] | np.ndarray, num_parts: int) -> list[list[int]]:
    """Divides items into ``num_parts`` lists, each item in turn, dearest first, to the part with the least so far."""
    costs = np.asarray(costs, dtype=np.float64)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, 0, part) for part in range(num_parts)]
    for item in np.argsort(-costs, kind="stable").tolist():
        total, num_items, part = heap[0]
        parts[part].append(item)
        heapq.heapreplace(heap, (total + float(costs[item]), num_items + 1, part))
    return parts


def best_fit_decreasing(items: Sequence[int], lengths: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    """Packs items into few bins: each, longest first, into the fullest bin that still has room."""
    return _best_fit(sorted(items, key=lambda item: (-lengths[item], item)), lengths, capacity_tokens)


def _best_fit(items: Sequence[int], lengths: Sequence[int], capacity_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []  # of each bin: free tokens * _MAX_BINS + its number, ascending
    for item in items:
        place = bisect.bisect_left(room, lengths[item] * _MAX_BINS)
        if place == len(room):
            bins.append([item])
            bisect.insort(room, (capacity_tokens - lengths[item]) * _MAX_BINS + len(bins) - 1)
        else:
            entry = room.pop(place)
            bins[entry % _MAX_BINS].append(item)
            bisect.insort(room, entry - lengths[item] * _MAX_BINS)
    return bins


def _even_bins(
    items: Sequence[int], lengths: Sequence[int], costs: Sequence[float], capacity_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Packs items, dearest first, into ``num_bins`` bins of about equal cost; None where that finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity_tokens] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for item in items:
        too_full = []
        while heap and room[heap[0][1]] < lengths[item]:
            too_full.append(heapq.heappop(heap))
        if not heap:
            return None
        total, index = heap[0]
        heapq.heapreplace(heap, (total + costs[item], index))
        bins[index].append(item)
        room[index] -= lengths[item]
        for entry in too_full:
            heapq.heappush(heap, entry)
    return [members for members in bins if members]


def _in_units(lengths: np.ndarray, cost: MicroBatchCost) -> tuple[list[float], float]:
    """The cost of each sequence, and of a micro-batch as such, as whole multiples of a power of two of a second.

    All of them together are below 2**41 units, so that floats add them without rounding: the answer does not depend on
    the order of adding, which differs between versions of Python (3.12 compensates in ``sum``) and of NumPy.
    """
    costs_s = cost.sequences_s(lengths)
    _, exponent = math.frexp(float(costs_s.sum()) + cost.c_s * len(lengths))
    unit_s = math.ldexp(1.0, exponent - 40)
    return np.rint(costs_s / unit_s).tolist(), float(round(cost.c_s / unit_s))


class _Packer:
    """Packs one replica's sequences, and says what that costs. Items are numbered longest first, so dearest first."""

    def __init__(self, lengths: np.ndarray, num_stages: int, capacity_tokens: int, cost: MicroBatchCost) -> None:
        self.lengths: list[int] = lengths.tolist()
        self.costs, self.constant = _in_units(lengths, cost)
        self._num_stages = num_stages
        self._capacity_tokens = capacity_tokens

    def time(self, bins: list[list[int]]) -> float:
        return pipeline_s([sum([self.costs[i] for i in b]) + self.constant for b in bins], self._num_stages)

    def least_time(self, work: float, num_tokens: int, longest: float) -> float:
        """A lower bound of the time of any packing of items with these sums of costs and tokens, and dearest item.

        In m micro-batches it takes at least ``work + m*c + (num_stages - 1) * (max(work / m, longest) + c)``, which
        falls until the m where it is least (``_useful_counts``) and rises from there.
        """
        num_bins = max(-(-num_tokens // self._capacity_tokens), min(self._useful_counts(work, longest)), 1.0)
        largest = max(work / num_bins, longest) + self.constant
        return work + num_bins * self.constant + (self._num_stages - 1) * largest

    def pack(self, items: Sequence[int]) -> tuple[float, list[list[int]]]:
        """(time, micro-batches) of the best packing tried; ``items`` ascend."""
        if not items:
            return 0.0, []
        work, num_tokens = sum([self.costs[i] for i in items]), sum([self.lengths[i] for i in items])
        longest = self.costs[items[0]]
        fewest = -(-num_tokens // self._capacity_tokens)
        if self._num_stages == 1:
            # Only their number counts.
            bins = _best_fit(items, self.lengths, self._capacity_tokens) if fewest > 1 else [items]
            return work + self.constant * len(bins), bins
        enough = self.least_time(work, num_tokens, longest) * (1 + RELATIVE_GAP)
        by_longest, by_overhead = self._useful_counts(work, longest)
        useful = min(math.ceil(by_longest), round(by_overhead), len(items))
        tried: dict[int, tuple[float, list[list[int]]]] = {}

        def try_even(num_bins: int) -> bool:
            if num_bins not in tried:
                bins = _even_bins(items, self.lengths, self.costs, self._capacity_tokens, num_bins)
                tried[num_bins] = (math.inf, []) if bins is None else (self.time(bins), bins)
            return tried[num_bins][0] <= enough

        if not try_even(max(fewest, useful)):
            full = _best_fit(items, self.lengths, self._capacity_tokens)
            tried[0] = self.time(full), full
            try_even(len(full))
            try_even(max(len(full), useful))
        return min(tried.values(), key=lambda packing: packing[0])

    def evened(self, bins: list[list[int]]) -> list[list[int]]:
        """The same items in as many micro-batches of about equal cost, where there is room: memory's peak falls."""
        if len(bins) < 2 or self._num_stages > 1:
            return bins
        items = sorted(i for b in bins for i in b)
        return _even_bins(items, self.lengths, self.costs, self._capacity_tokens, len(bins)) or bins

    def _useful_counts(self, work: float, longest: float) -> tuple[float, float]:
        """How many micro-batches this pipeline gains from: as many as its longest sequence, and their overhead, allow.

        More than ``work / longest`` do not make the largest smaller. With work Q in m equal micro-batches,
        ``Q + m*c + (num_stages - 1) * (Q/m + c)`` is least at ``m = sqrt((num_stages - 1) * Q / c)``.
        """
        most = float(len(self.costs))
        by_longest = min(work / longest, most) if longest > 0 else most
        if self._num_stages == 1:
            return by_longest, 0.0
        by_overhead = math.sqrt((self._num_stages - 1) * work / self.constant) if self.constant > 0 else most
        return by_longest, by_overhead


def balance_packed(
    lengths: np.ndarray, *, num_replicas: int, num_stages: int, capacity_tokens: int, cost: MicroBatchCost
) -> Grouping:
    """Packs sequences of ``lengths`` (tokens, each at most the capacity) for ``num_replicas`` replicas."""
    order = np.argsort(-lengths, kind="stable")
    packer = _Packer(lengths[order], num_stages, capacity_tokens, cost)
    divisions = [longest_first(packer.costs, num_replicas)]
    fewest = -(-int(lengths.sum()) // capacity_tokens)
    if packer.constant > 0 and fewest > 1:
        # where the overhead of a micro-batch counts, dividing whole full micro-batches may need fewer
        bins = _best_fit(range(len(lengths)), packer.lengths, capacity_tokens)
        bins_cost = [sum([packer.costs[i] for i in b]) + packer.constant for b in bins]
        divisions.append([[i for b in part for i in bins[b]] for part in longest_first(bins_cost, num_replicas)])
    best: list[tuple[float, list[list[int]]]] = []
    for division in divisions:
        packed = [packer.pack(sorted(part)) for part in division]
        if not best or max(time for time, _ in packed) < max(time for time, _ in best):
            best = packed
    work = sum(packer.costs)
    bound = max(
        packer.least_time(packer.costs[0], int(lengths.max()), packer.costs[0]),
        packer.least_time(work / num_replicas, 0, packer.costs[-1]),
        (work + packer.constant * fewest) / num_replicas,
    )
    numbers = order.tolist()
    return [[[numbers[i] for i in b] for b in packer.evened(bins)] for _, bins in _improve(best, packer, bound)]


def _improve(
    packed: list[tuple[float, list[list[int]]]], packer: _Packer, bound: float
) -> list[tuple[float, list[list[int]]]]:
    """Moves or swaps single sequences out of the slowest replica while that helps."""
    packed = list(packed)
    costs = np.array(packer.costs)
    held = [sorted(i for b in bins for i in b) for _, bins in packed]
    trials = min(MAX_TRIALS, max(MIN_TRIALS, TRIAL_SEQUENCES * len(packed) // (2 * len(costs))))
    while trials > 0:
        times = [time for time, _ in packed]
        slowest = max(range(len(packed)), key=times.__getitem__)
        if times[slowest] <= bound * (1 + RELATIVE_GAP):
            break
        for given, taken, receiver in _proposals(held, times, slowest, costs)[:trials]:
            trials -= 1
            ours = sorted([i for i in held[slowest] if i != given] + ([] if taken is None else [taken]))
            first = packer.pack(ours)
            if first[0] >= times[slowest] * (1 - 1e-9):
                continue
            theirs = sorted([i for i in held[receiver] if i != taken] + [given])
            second = packer.pack(theirs)
            if second[0] < times[slowest] * (1 - 1e-9):
                packed[slowest], packed[receiver] = first, second
                held[slowest], held[receiver] = ours, theirs
                break
        else:
            break
    return packed


def _proposals(
    held: list[list[int]], times: list[float], slowest: int, costs: np.ndarray
) -> list[tuple[int, int | None, int]]:
    """Promising exchanges, best first: (item given, item taken if any, receiving replica).

    For each of the least loaded replicas and each item to give, the item taken back is the one whose difference
    comes nearest to evening the two out; repacking is not foreseen. Items are numbered dearest first.
    """
    given = np.array(held[slowest])
    given_costs = costs[given]
    found: list[tuple[float, int, int, int | None]] = []
    receivers = sorted((r for r in range(len(held)) if r != slowest), key=times.__getitem__)
    for receiver in receivers[:NUM_RECEIVERS]:
        gap = times[slowest] - times[receiver]
        takeable = held[receiver]
        # cheapest first; taking nothing is an item without cost
        takeable_costs = np.zeros(len(takeable) + 1)
        takeable_costs[1:] = costs[takeable[::-1]]
        above = np.searchsorted(takeable_costs, given_costs - gap / 2)
        choice = np.concatenate([np.maximum(above - 1, 0), np.minimum(above, len(takeable))])
        off = np.abs(np.concatenate([given_costs, given_costs]) - takeable_costs[choice] - gap / 2)
        for place in np.argsort(off, kind="stable")[: 2 * NUM_PROPOSALS].tolist():
            if off[place] < gap / 2:  # the larger of the two gets smaller
                number = int(choice[place])
                taken = takeable[len(takeable) - number] if number else None
                found.append((float(off[place]) - gap / 2, int(given[place % len(given)]), receiver, taken))
    found.sort(key=lambda proposal: proposal[:3])
    return [(item, taken, receiver) for _, item, receiver, taken in found[:NUM_PROPOSALS]]


def balance_padded(
    lengths: np.ndarray, *, num_replicas: int, num_stages: int, capacity_tokens: int, cost: MicroBatchCost
) -> Grouping:
    """Groups rows of ``lengths`` into micro-batches with rows times longest within the capacity.

    Rows of similar length share a micro-batch, which keeps padding low. Several sizes of micro-batch are tried, with
    whole micro-batches divided among replicas and with rows divided first.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    row_tokens: list[int] = lengths.tolist()
    row_costs, constant = _in_units(lengths, cost)
    work = sum(row_costs)
    best: Grouping = []
    best_time = math.inf
    divided = [sorted(part, key=lambda i: (-row_tokens[i], i)) for part in longest_first(row_costs, num_replicas)]
    for micro_batches_each in (0, 1, 2, 4, 16, 64, 2 * num_stages):
        limit = 1.02 * work / (num_replicas * micro_batches_each) if micro_batches_each else math.inf
        groups = _similar_rows(order, row_tokens, row_costs, capacity_tokens, limit)
        group_costs = [len(group) * row_costs[group[0]] + constant for group in groups]
        whole = [[groups[g] for g in part] for part in longest_first(group_costs, num_replicas)]
        rows_first = [_similar_rows(part, row_tokens, row_costs, capacity_tokens, limit) for part in divided]
        for grouping in (whole, rows_first):
            slowest = max(
                pipeline_s([len(group) * row_costs[group[0]] + constant for group in replica], num_stages)
                for replica in grouping
            )
            if slowest < best_time * (1 - 1e-9):
                best, best_time = grouping, slowest
    return best


def _similar_rows(
    order: Sequence[int], row_tokens: Sequence[int], row_costs: Sequence[float], capacity_tokens: int, limit: float
) -> list[list[int]]:
    """Cuts rows, given longest first, into runs within the capacity and (one row apart) within ``limit``."""
    groups: list[list[int]] = []
    for item in order:
        if groups:
            group = groups[-1]
            num_rows = len(group) + 1
            if num_rows * row_tokens[group[0]] <= capacity_tokens and num_rows * row_costs[group[0]] <= limit:
                group.append(item)
                continue
        groups.append([item])
    return groups
