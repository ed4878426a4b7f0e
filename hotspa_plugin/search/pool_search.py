"""Finds the pool, its bounds and its home that minimise the expected time of a step, and the best static strategy.

For each home that fits in memory a dynamic program over a grid of bounds picks the strategy of every bucket. It starts
with lower bounds for the switches and replaces those that it wants to use by the cost of real reshard plans until
nothing changes, so that few plans are made and the result is the program's optimum. The quick estimate of a bucket's
time (``bucket_estimate``) serves here; the caller prices what is found by real assignments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.cost import Profile
from hotspa_plugin.search.bucket_estimate import Lane, LengthTables
from hotspa_plugin.search.step_model import PlannedPool, StepModel
from hotspa_plugin.strategy import ModelShape, ParallelStrategy, PoolEntry
from hotspa_plugin.strategy.checks import check_model
from hotspa_plugin.strategy.parallel_strategy import divisors

GRID_STEP = 2**0.5
GRID_START_TOKENS = 128
MAX_BUCKETS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """A pool and the estimate of its mean step time."""

    pool: PlannedPool
    estimate_s: float


def possible_strategies(
    shape: ModelShape, num_ranks: int, *, recompute: Sequence[str] = ("none", "full")
) -> list[ParallelStrategy]:
    """All tp and pp that fit a model and so many ranks, dp resolved, each with every kind of ``recompute``."""
    found = []
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            strategy = ParallelStrategy(tp=tp, pp=pp).resolve(num_ranks)
            try:
                check_model(strategy, shape)
            except ValueError:
                continue
            found += [dataclasses.replace(strategy, recompute=mode) for mode in recompute]
    return found


def candidate_strategies(
    profile: Profile, num_ranks: int, *, recompute: Sequence[str] = ("none", "full")
) -> list[ParallelStrategy]:
    """The profiled strategies that fit the model and so many ranks, dp resolved.

    ValueError where there is none.
    """
    found = []
    for stage in profile.stages:
        strategy = stage.strategy
        if stage.recompute not in recompute or num_ranks % (stage.tp * stage.pp):
            continue
        try:
            check_model(strategy, profile.model.shape())
        except ValueError:
            continue
        found.append(strategy.resolve(num_ranks))
    if not found:
        sizes = ", ".join(sorted({str(s.tp * s.pp) for s in profile.stages}, key=int))
        raise ValueError(
            f"{num_ranks} ranks: no strategy of the profile of {profile.model.name} fits; tp*pp must divide the number "
            f"of ranks, and the profile has tp*pp of {sizes}"
        )
    return found


def check_lengths(model: StepModel, candidates: Sequence[ParallelStrategy], longest_tokens: int) -> None:
    """Raises ValueError, naming the nearest possible values, where no strategy can hold the longest sequence alone."""
    most = max(candidates, key=lambda s: model.memory.capacity_tokens(s, s, hot=False))
    capacity = model.memory.capacity_tokens(most, most, hot=False)
    if capacity >= longest_tokens:
        return
    needs = {s: model.memory.bucket(s, s, micro_batch_tokens=longest_tokens, hot=False).total_bytes for s in candidates}
    least = min(needs, key=needs.get)
    limit = model.memory.limit_bytes
    if capacity == 0:
        raise ValueError(
            f"memory limit of {_gigabytes(limit)} a rank: no strategy fits, not even without a token; the least for "
            f"sequences of {longest_tokens} tokens is {_gigabytes(needs[least])}, with {least}"
        )
    raise ValueError(
        f"sequences of {longest_tokens} tokens are more than any strategy can hold in {_gigabytes(limit)} a rank: the "
        f"most is {capacity} tokens, with {most}; or allow {_gigabytes(needs[least])}, with {least}"
    )


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e9:.4f} GB"


class PoolSearch:
    """Searches over pools for some sampled batches (lengths in tokens, shape ``[num_sequences]`` each)."""

    def __init__(self, model: StepModel, candidates: Sequence[ParallelStrategy], batches: Sequence[np.ndarray]) -> None:
        self._model = model
        self._candidates = list(candidates)
        self._longest = int(max(batch.max() for batch in batches))
        self._tables = LengthTables(batches, self._grid())
        count = self._tables.count
        # Share of batches with a sequence in a bucket.
        self._filled = (count[:, None, :] > count[:, :, None]).mean(axis=0)
        self._bucket_s: dict[tuple[ParallelStrategy, int], np.ndarray] = {}

    @property
    def cuts_tokens(self) -> np.ndarray:
        """The bounds that are searched over, ascending from 0."""
        return self._tables.cuts_tokens

    def _grid(self) -> np.ndarray:
        start = max(1, min(GRID_START_TOKENS, self._longest // 16))
        unit = max(1, start // 2)
        steps = int(np.ceil(np.log(self._longest / start) / np.log(GRID_STEP)))
        regular = np.rint(start * GRID_STEP ** np.arange(max(steps, 0)) / unit) * unit
        capacities = {
            self._model.memory.capacity_tokens(s, h, hot=True) // unit * unit
            for h in self._candidates
            for s in self._candidates
        }
        # What strategies can hold beside some home matters as a bound; a few representatives suffice.
        inside = np.array(sorted(c for c in capacities if start < c < self._longest))
        chosen = inside[np.linspace(0, len(inside) - 1, min(len(inside), 16)).astype(int)] if len(inside) else inside
        cuts = np.unique(np.concatenate([[0], regular, chosen, [self._longest]])).astype(np.int64)
        return cuts[cuts <= self._longest]

    def _mean_bucket_s(self, strategy: ParallelStrategy, capacity: int) -> np.ndarray:
        """Mean seconds over batches of every bucket, ``[num_cuts, num_cuts]``; infinite where a bound does not fit."""
        key = (strategy, min(capacity, 8 * self._longest))
        if key not in self._bucket_s:
            profile = self._model.profile
            lane = Lane(
                num_replicas=strategy.dp,
                num_stages=strategy.pp,
                capacity_tokens=key[1],
                cost=profile.stage(strategy).cost,
                ranks_per_core=profile.machine.ranks_per_core,
            )
            seconds = self._tables.bucket_s(lane).mean(axis=0)
            seconds[:, self._tables.cuts_tokens > capacity] = np.inf
            self._bucket_s[key] = seconds
        return self._bucket_s[key]

    def _home_s(self, home: ParallelStrategy, capacity: int) -> float:
        """What home costs beside buckets; the last micro-batch is taken to be full."""
        full = self._model.profile.stage(home).cost.packed_s([min(capacity, self._longest)])
        return self._model.home_time(home, full).total_s

    def static(self) -> list[Found]:
        """Every static strategy that can hold the longest sequence, fastest first."""
        found = []
        for strategy in self._candidates:
            pool = self._model.static_pool(strategy, self._longest)
            if pool is not None:
                capacity = pool.micro_batch_tokens[0]
                seconds = float(self._mean_bucket_s(strategy, capacity)[0, -1]) + self._home_s(strategy, capacity)
                found.append(Found(pool=pool, estimate_s=seconds))
        return sorted(found, key=lambda f: (f.estimate_s, str(f.pool)))

    def hot(self, num_best: int = 6) -> list[Found]:
        """The best pools of at least two strategies, at most one per home, fastest first."""
        found: list[Found] = []
        homes = []
        for home in self._candidates:
            program = self._program(home)
            if program is not None:
                lower = program.solve()
                if lower is not None:
                    homes.append((lower[0], str(home), home, program))
        for lower_s, _, home, program in sorted(homes, key=lambda h: h[:2]):
            if len(found) >= num_best and lower_s >= sorted(f.estimate_s for f in found)[num_best - 1]:
                break
            best = self._exact(home, program)
            if best is not None:
                found.append(best)
        return sorted(found, key=lambda f: (f.estimate_s, str(f.pool)))[:num_best]

    def _program(self, home: ParallelStrategy) -> _Program | None:
        memory = self._model.memory
        strategies = [s for s in self._candidates if memory.capacity_tokens(s, home) > 0]
        if home not in strategies:
            return None
        gradient_bytes = memory.slab_gradient_bytes
        transitions = {
            s: 0.0
            if s == home
            else self._model.communication.least_transition_s(
                memory.num_parameters(home), memory.num_parameters(s), gradient_bytes=gradient_bytes
            )
            for s in strategies
        }
        bucket_s = {s: self._mean_bucket_s(s, memory.capacity_tokens(s, home)) for s in strategies}
        home_s = self._home_s(home, memory.capacity_tokens(home, home))
        return _Program(home=home, bucket_s=bucket_s, transitions=transitions, filled=self._filled, home_s=home_s)

    def _exact(self, home: ParallelStrategy, program: _Program) -> Found | None:
        """The program's optimum with real switch costs."""
        known = {home}
        while (solution := program.solve()) is not None:
            seconds, buckets = solution
            new = {s for _, s in buckets} - known
            if not new:
                entries = [
                    PoolEntry(strategy=s, bound_tokens=int(self._tables.cuts_tokens[high])) for high, s in buckets
                ]
                return Found(pool=self._model.hot_pool(entries, home), estimate_s=seconds)
            for strategy in new:
                program.transitions[strategy] = self._model.transition(home, strategy).total_s
            known |= new
        return None


@dataclasses.dataclass(kw_only=True)
class _Program:
    """Best buckets for one home. A solution is (seconds, [(index of the upper cut, strategy), ...])."""

    home: ParallelStrategy
    bucket_s: dict[ParallelStrategy, np.ndarray]
    transitions: dict[ParallelStrategy, float]
    filled: np.ndarray
    home_s: float

    def solve(self) -> tuple[float, list[tuple[int, ParallelStrategy]]] | None:
        forbidden: dict[ParallelStrategy, int] = {}  # strategy -> cut that its buckets must end above
        while True:
            solution = self._solve(forbidden)
            if solution is None:
                return None
            used = [s for _, s in solution[1]]
            twice = {s for s in used if used.count(s) > 1}
            if not twice:
                return solution
            # A pool names a strategy once: it keeps its longest bucket.
            for strategy in twice:
                forbidden[strategy] = [high for high, s in solution[1] if s == strategy][-2]

    def _solve(self, forbidden: dict[ParallelStrategy, int]) -> tuple[float, list[tuple[int, ParallelStrategy]]] | None:
        others = [s for s in self.bucket_s if s != self.home]
        num_cuts = self.filled.shape[0]
        upper = np.tri(num_cuts, k=-1, dtype=bool).T
        if not others:
            return None
        costs = []
        for strategy in others:
            cost = self.bucket_s[strategy] + self.filled * self.transitions[strategy]
            if strategy in forbidden:
                cost = cost.copy()
                cost[:, : forbidden[strategy] + 1] = np.inf
            costs.append(cost)
        stacked = np.stack(costs)
        choice = np.argmin(stacked, axis=0)
        away = np.where(upper, np.min(stacked, axis=0), np.inf)
        at_home = np.where(upper, self.bucket_s[self.home], np.inf)
        # state: (buckets so far, home used); value by the last cut
        start = np.full(num_cuts, np.inf)
        start[0] = 0.0
        states = {(0, False): start}
        origin = {}
        for number in range(1, MAX_BUCKETS + 1):
            for used in (False, True):
                ways = []
                for before, step in [(used, away), (False, at_home)] if used else [(False, away)]:
                    if (number - 1, before) in states:
                        ways.append((before, step is at_home, states[number - 1, before][:, None] + step))
                if not ways:
                    continue
                best = np.stack([np.min(way, axis=0) for _, _, way in ways])
                pick = np.argmin(best, axis=0)
                states[number, used] = np.min(best, axis=0)
                origin[number, used] = (pick, [(b, h, np.argmin(way, axis=0)) for b, h, way in ways])
        ends = [(states[n, True][-1], n) for n in range(2, MAX_BUCKETS + 1) if (n, True) in states]
        if not ends or not np.isfinite(min(ends)[0]):
            return None
        seconds, number = min(ends)
        buckets, used, high = [], True, num_cuts - 1
        while number:
            pick, ways = origin[number, used]
            before, is_home, lows = ways[pick[high]]
            low = int(lows[high])
            buckets.append((high, self.home if is_home else others[choice[low, high]]))
            number, used, high = number - 1, before, low
        return seconds + self.home_s, buckets[::-1]
