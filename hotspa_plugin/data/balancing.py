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
    items: Sequence[int], lengths: Sequence[int], costs: Sequence[float], capacity_tokens: int, num_bins: int
) -> list[list[int]] | None:
    """Packs items into ``num_bins`` bins of about equal cost, or None where this greedy way finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [capacity_tokens] * num_bins
    heap = [(0.0, index) for index in range(num_bins)]
    for item in sorted(items, key=lambda item: (-costs[item], -lengths[item], item)):
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
    """Packs one replica's sequences, and says what that costs."""

    def __init__(self, lengths: np.ndarray, num_stages: int, capacity_tokens: int, cost: MicroBatchCost) -> None:
        self.lengths: list[int] = lengths.tolist()
        self.costs, self.constant = _in_units(lengths, cost)
        self._num_stages = num_stages
        self._capacity_tokens = capacity_tokens

    def time(self, bins: list[list[int]]) -> float:
        return pipeline_s([sum(self.costs[i] for i in b) + self.constant for b in bins], self._num_stages)

    def pack(self, items: Sequence[int]) -> tuple[float, list[list[int]]]:
        """(time, micro-batches) of the best packing tried."""
        if not items:
            return 0.0, []
        fewest = best_fit_decreasing(items, self.lengths, self._capacity_tokens)
        candidates = [fewest]
        counts = {len(fewest), self._fitting_count(items, len(fewest))}
        for num_bins in sorted(counts):
            even = _even_bins(items, self.lengths, self.costs, self._capacity_tokens, num_bins)
            if even is not None:
                candidates.insert(0, even)
        times = [self.time(bins) for bins in candidates]
        best = min(range(len(times)), key=times.__getitem__)
        return times[best], candidates[best]

    def _fitting_count(self, items: Sequence[int], fewest: int) -> int:
        """How many micro-batches fill this pipeline best.

        With total work Q in m equal micro-batches, ``Q + m*c + (num_stages - 1) * (Q/m + c)`` is least at
        ``m = sqrt((num_stages - 1) * Q / c)``; a single long sequence limits how small the largest can get.
        """
        if self._num_stages == 1:
            return fewest
        work = sum(self.costs[i] for i in items)
        longest = max(self.costs[i] for i in items)
        useful = math.ceil(work / longest) if longest > 0 else 1
        if self.constant > 0:
            useful = min(useful, round(math.sqrt((self._num_stages - 1) * work / self.constant)))
        return max(fewest, min(useful, len(items)))


def balance_packed(
    lengths: np.ndarray, *, num_replicas: int, num_stages: int, capacity_tokens: int, cost: MicroBatchCost
) -> Grouping:
    """Packs sequences of ``lengths`` (tokens, each at most the capacity) for ``num_replicas`` replicas."""
    packer = _Packer(lengths, num_stages, capacity_tokens, cost)
    divisions = [longest_first(packer.costs, num_replicas)]
    if packer.constant > 0:
        # where the overhead of a micro-batch counts, dividing whole full micro-batches may need fewer
        bins = best_fit_decreasing(range(len(lengths)), packer.lengths, capacity_tokens)
        bins_cost = [sum(packer.costs[i] for i in b) + packer.constant for b in bins]
        divisions.append([[i for b in part for i in bins[b]] for part in longest_first(bins_cost, num_replicas)])
    best: list[tuple[float, list[list[int]]]] = []
    for division in divisions:
        packed = [packer.pack(part) for part in division]
        if not best or max(time for time, _ in packed) < max(time for time, _ in best):
            best = packed
    fewest_bins = -(-int(lengths.sum()) // capacity_tokens)
    bound = max(
        max(packer.costs) * num_stages + packer.constant * num_stages,
        (sum(packer.costs) + packer.constant * fewest_bins) / num_replicas,
    )
    return [bins for _, bins in _improve(best, packer, bound)]


def _improve(
    packed: list[tuple[float, list[list[int]]]], packer: _Packer, bound: float
) -> list[tuple[float, list[list[int]]]]:
    """Moves or swaps single sequences out of the slowest replica while that helps."""
    packed = list(packed)
    num_items = len(packer.costs)
    trials = min(MAX_TRIALS, max(MIN_TRIALS, TRIAL_SEQUENCES * len(packed) // (2 * num_items)))
    while trials > 0:
        times = [time for time, _ in packed]
        slowest = max(range(len(packed)), key=times.__getitem__)
        if times[slowest] <= bound * (1 + RELATIVE_GAP):
            break
        for _, given, taken, receiver in _proposals(packed, times, slowest, packer.costs)[:trials]:
            trials -= 1
            ours = [i for b in packed[slowest][1] for i in b if i != given] + ([] if taken is None else [taken])
            theirs = [i for b in packed[receiver][1] for i in b if i != taken] + [given]
            first, second = packer.pack(ours), packer.pack(theirs)
            if max(first[0], second[0]) < times[slowest] * (1 - 1e-9):
                packed[slowest], packed[receiver] = first, second
                break
        else:
            break
    return packed


def _proposals(
    packed: list[tuple[float, list[list[int]]]], times: list[float], slowest: int, costs: list[float]
) -> list[tuple[float, int, int | None, int]]:
    """Promising exchanges, best first: (larger time after it, item given, item taken if any, receiving replica).

    For each of the least loaded replicas and each item to give, the item taken back is the one whose difference
    comes nearest to evening the two out; repacking is not foreseen.
    """
    given = [i for b in packed[slowest][1] for i in b]
    given_costs = np.array([costs[i] for i in given])
    found: list[tuple[float, int, int | None, int]] = []
    receivers = sorted((r for r in range(len(packed)) if r != slowest), key=times.__getitem__)
    for receiver in receivers[:NUM_RECEIVERS]:
        # taking nothing is an item without cost
        takeable = [None, *sorted((i for b in packed[receiver][1] for i in b), key=lambda i: (costs[i], i))]
        takeable_costs = np.array([0.0 if i is None else costs[i] for i in takeable])
        gap = times[slowest] - times[receiver]
        nearest = np.searchsorted(takeable_costs, given_costs - gap / 2)
        for choice in (np.maximum(nearest - 1, 0), np.minimum(nearest, len(takeable) - 1)):
            shift = given_costs - takeable_costs[choice]
            after = np.maximum(times[slowest] - shift, times[receiver] + shift)
            after[(shift <= 0) | (shift >= gap)] = np.inf
            for place in np.argsort(after, kind="stable")[:NUM_PROPOSALS].tolist():
                if np.isfinite(after[place]):
                    found.append((float(after[place]), given[place], takeable[choice[place]], receiver))
    return sorted(found, key=lambda proposal: (proposal[0], proposal[1], proposal[3]))[:NUM_PROPOSALS]


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
