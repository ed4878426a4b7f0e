"""Which strategy trains which sequence of one batch, chosen from the batch's actual lengths.

The bounds of a pool are those of a typical batch. Here each batch gets its own: buckets are merged into another
strategy where the switch costs more than it saves, sequences are promoted where a longer strategy has room, and the
rest is the usual balancing. The choice uses figures that were fixed at start, never live timings, so that a resumed run
repeats it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.cost import MicroBatchCost
from hotspa_plugin.data.assignment import BatchAssignment, BucketAssignment, BucketSpec, Packing, assign_bucket
from hotspa_plugin.search.bucket_estimate import Lane, LengthTables

MAX_CUTS = 40
NUM_PRICED = 2  # subsets of the pool that are packed for real,
PRICED_GAP = 1.05  # where their estimate is this close to the best one's; estimates of small batches say less,
SMALL_BATCH = 64  # so that up to here all are packed
REFINED_SEQUENCES = 400  # refinement packs about so many sequences again, which bounds its time
MAX_TRIALS = 240


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOption:
    """One strategy of a pool: what it can hold, what its micro-batches cost, and what going there and back costs.

    It takes sequences of up to ``spec.capacity_tokens``. ``transition_s`` is 0 at home. ``ranks_per_core`` is that of
    the machine (``cost.profile.MachineFigures``).
    """

    spec: BucketSpec
    cost: MicroBatchCost
    transition_s: float
    ranks_per_core: float = 1.0

    @property
    def lane(self) -> Lane:
        spec = self.spec
        return Lane(
            num_replicas=spec.num_replicas,
            num_stages=spec.num_stages,
            capacity_tokens=spec.capacity_tokens,
            cost=self.cost,
            ranks_per_core=self.ranks_per_core,
        )

    def bucket_s(self, bucket: BucketAssignment) -> float:
        """Seconds of a bucket that this strategy runs, with the switches there and back."""
        return bucket.seconds(self.ranks_per_core) + self.transition_s


class BatchAssigner:
    """Assigns batches to the strategies of a pool, given in the pool's order: by ascending bounds.

    All ranks find the same assignment from the same lengths.
    """

    def __init__(self, options: Sequence[StrategyOption], *, packing: Packing = "packed") -> None:
        if not options:
            raise ValueError("batch assignment: there is no strategy to choose from; give at least one")
        self._options = tuple(options)
        self._packing = packing
        # Longer sequences go to strategies that hold more.
        self._order = sorted(range(len(options)), key=lambda i: (options[i].spec.capacity_tokens, i))
        self._bounds = np.array([o.spec.bound_tokens for o in options], dtype=np.int64)
        self._capacities = np.array([o.spec.capacity_tokens for o in options], dtype=np.int64)

    def assign(self, lengths: np.ndarray | Sequence[int]) -> BatchAssignment:
        """The assignment of a batch with these lengths in tokens, shape ``[num_sequences]``.

        ValueError where a sequence is empty or over the pool's last bound.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        if len(lengths) == 0:
            return BatchAssignment(packing=self._packing, buckets=())
        if lengths.min() < 1:
            raise ValueError(f"sample {int(lengths.argmin())}: has no tokens: leave empty sequences out")
        if lengths.max() > self._bounds[-1]:
            raise ValueError(
                f"sample {int(lengths.argmax())}: {lengths.max()} tokens are over the pool's last bound, "
                f"{self._bounds[-1]}: raise the bound, or truncate, split or drop long sequences"
            )
        work = _Work(self, lengths)
        choices = self._likely_choices(lengths)
        # The pool's own bounds: what is chosen is never slower.
        choices.append(np.searchsorted(self._bounds, lengths, side="left"))
        priced = [work.price(choice) for choice in choices]
        best = min(range(len(priced)), key=lambda i: priced[i].seconds)
        return work.built(work.refine(priced[best]))

    def predicted_s(self, assignment: BatchAssignment) -> float:
        """Seconds of an assignment: every bucket and its switches."""
        return sum(self._options[bucket.bucket].bucket_s(bucket) for bucket in assignment.buckets)

    def _likely_choices(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Options by sample, for the few subsets of the pool whose best bounds look fastest."""
        cuts = _cuts(lengths, self._capacities)
        tables = LengthTables([lengths], cuts)
        seconds = []
        for option in self._options:
            bucket_s = tables.bucket_s(option.lane)[0]
            count = tables.count[0]
            seconds.append(np.where(count[None, :] > count[:, None], bucket_s + option.transition_s, 0.0))
        found = []
        for size in range(1, len(self._order) + 1):
            for subset in itertools.combinations(self._order, size):
                total, ends = _best_bounds([seconds[i] for i in subset])
                if np.isfinite(total):
                    found.append((total, len(found), subset, ends))
        choices, seen = [], set()
        found.sort()
        for total, _, subset, ends in found:
            if len(lengths) > SMALL_BATCH and total > found[0][0] * PRICED_GAP:
                break
            place = np.searchsorted(cuts[np.array(ends)], lengths, side="left")
            choice = np.array(subset)[place]
            if choice.tobytes() not in seen:
                seen.add(choice.tobytes())
                choices.append(choice)
            if len(choices) == NUM_PRICED:
                break
        return choices


def _cuts(lengths: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Lengths worth a bound: all in a small batch, else denser among the long ones; and what strategies hold."""
    distinct = np.unique(lengths)
    if len(distinct) > MAX_CUTS:
        from_top = np.unique(np.rint(np.geomspace(1, len(distinct), MAX_CUTS)).astype(np.int64))
        distinct = distinct[len(distinct) - from_top]
    held = np.searchsorted(np.sort(lengths), capacities, side="right")
    longest_held = np.sort(lengths)[held[held > 0] - 1]
    return np.unique(np.concatenate([[0], distinct, longest_held, [lengths.max()]]))


def _best_bounds(seconds: Sequence[np.ndarray]) -> tuple[float, list[int]]:
    """The least sum over strategies, in order, of their buckets' seconds, and the index of each bucket's upper cut."""
    num_cuts = seconds[0].shape[0]
    total = np.where(np.arange(num_cuts) == 0, 0.0, np.inf)
    origins = []
    for bucket_s in seconds:
        through = total[:, None] + np.where(np.tri(num_cuts, dtype=bool).T, bucket_s, np.inf)
        origins.append(np.argmin(through, axis=0))
        total = np.min(through, axis=0)
    ends, at = [], num_cuts - 1
    for origin in reversed(origins):
        ends.append(at)
        at = int(origin[at])
    return float(total[-1]), ends[::-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Priced:
    choice: np.ndarray  # option by sample
    buckets: dict[int, BucketAssignment]
    seconds: float


class _Work:
    """Packs choices for one batch; buckets that did not change are packed once."""

    def __init__(self, assigner: BatchAssigner, lengths: np.ndarray) -> None:
        self._assigner, self._lengths = assigner, lengths
        self._options = assigner._options
        self._packed: dict[tuple[int, bytes], BucketAssignment] = {}
        self._costs_s = [option.cost.sequences_s(lengths).tolist() for option in self._options]  # [option][sample]
        self.num_packed = 0

    def price(self, choice: np.ndarray) -> _Priced:
        buckets, seconds = {}, 0.0
        for index, option in enumerate(self._options):
            positions = np.flatnonzero(choice == index)
            if len(positions) == 0:
                continue
            key = (index, positions.tobytes())
            if key not in self._packed:
                self.num_packed += len(positions)
                self._packed[key] = assign_bucket(
                    index, option.spec, positions, self._lengths[positions], self._assigner._packing, option.cost
                )
            buckets[index] = self._packed[key]
            seconds += option.bucket_s(buckets[index])
        return _Priced(choice=choice, buckets=buckets, seconds=seconds)

    def refine(self, best: _Priced) -> _Priced:
        """Moves sequences one by one to other strategies while that helps and the budget lasts."""
        start, trials = self.num_packed, 0
        improved = True
        while improved:
            improved = False
            for sample, index in self._moves(best):
                trials += 1
                if trials > MAX_TRIALS or self.num_packed - start > REFINED_SEQUENCES:
                    return best
                choice = best.choice.copy()
                choice[sample] = index
                moved = self.price(choice)
                if moved.seconds < best.seconds * (1 - 1e-9):
                    best, improved = moved, True
                    break
        return best

    def _moves(self, priced: _Priced) -> list[tuple[list[int], int]]:
        """(samples, option) worth trying: whole replicas' work first, then that of the slowest ones, dearest first."""
        lengths, found = self._lengths.tolist(), []
        for index, bucket in priced.buckets.items():
            slowest = int(np.argmax(bucket.replica_costs_s))
            samples = [s for m in bucket.replicas[slowest] for s in m.samples]
            groups = [samples] if len(samples) > 1 else []
            groups += [[s] for s in samples]
            # pairs of replicas tie often in small buckets: then both must give
            others = [r for r, cost in enumerate(bucket.replica_costs_s) if r != slowest and bucket.replicas[r]]
            groups += [[s] for r in others for m in bucket.replicas[r] for s in m.samples][: 4 * len(samples)]
            for group in groups:
                longest = max(lengths[s] for s in group)
                cost_here = sum(self._costs_s[index][s] for s in group)
                for other, option in enumerate(self._options):
                    if other == index or option.spec.capacity_tokens < longest:
                        continue
                    cost_there = sum(self._costs_s[other][s] for s in group) / option.spec.num_replicas
                    new = 0.0 if other in priced.buckets else option.transition_s
                    found.append((new + cost_there - cost_here, group, other))
        return [(group, other) for _, group, other in sorted(found, key=lambda m: (m[0], m[1], m[2]))]

    def built(self, priced: _Priced) -> BatchAssignment:
        buckets = tuple(priced.buckets[index] for index in sorted(priced.buckets))
        return BatchAssignment(packing=self._assigner._packing, buckets=buckets)
