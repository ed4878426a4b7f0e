"""A plan: the best pool found, the best static strategy, what each is predicted to take, and which one to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hotspa_plugin.cost import StepTime
from hotspa_plugin.search.pool_search import PoolSearch, candidate_strategies, check_lengths
from hotspa_plugin.search.step_model import MAX_ASSIGNED_SEQUENCES, PlannedPool, StepModel

WORTH_SWITCHING = 1.02  # below this predicted gain a static strategy is advised: it is simpler and just as fast
NUM_SEARCH_BATCHES, NUM_CHECK_BATCHES = 8, 12
NUM_PRICED = 5
NUM_REFINE_BATCHES = 4
CHECK_SEED = 1_000_003  # plans are checked on other batches than they were found with


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Step times of one pool on several batches."""

    pool: PlannedPool
    steps: tuple[StepTime, ...]

    @property
    def mean(self) -> StepTime:
        return sum(self.steps[1:], self.steps[0]) / len(self.steps)

    @property
    def seconds(self) -> np.ndarray:
        return np.array([step.total_s for step in self.steps])


def predict(
    model: StepModel, pool: PlannedPool, batches: Sequence[np.ndarray], *, per_batch: bool = False
) -> Prediction:
    """The predicted steps of ``pool`` on ``batches``, by its bounds or with ``per_batch`` by each batch's own."""
    return Prediction(
        pool=pool, steps=tuple(model.step_time(pool, lengths, per_batch=per_batch) for lengths in batches)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
    """How much faster one prediction is than another, from the same batches.

    ``low`` and ``high`` bound the ratio of means by two standard errors of the batches' differences. ``model_error`` is
    the relative error to expect of the stages' times.
    """

    ratio: float
    low: float
    high: float
    model_error: float

    @classmethod
    def between(cls, slow: Prediction, fast: Prediction, *, model_error: float) -> Gain:
        difference = slow.seconds - fast.seconds
        mean = fast.seconds.mean()
        error = 2 * difference.std(ddof=1) / np.sqrt(len(difference)) / mean if len(difference) > 1 else 0.0
        ratio = float(slow.seconds.mean() / mean)
        return cls(ratio=ratio, low=ratio - float(error), high=ratio + float(error), model_error=model_error)

    @property
    def worth_switching(self) -> bool:
        return self.ratio >= WORTH_SWITCHING and self.low > 1

    @property
    def certainty(self) -> str:
        """``clear`` where the gain is beyond both errors, ``likely`` where beyond the batches' alone, else ``open``."""
        if abs(self.ratio - 1) > self.model_error and (self.low - 1) * (self.high - 1) > 0:
            return "clear"
        return "likely" if (self.low - 1) * (self.high - 1) > 0 else "open"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train with. Predictions are sorted, fastest first; ``hot`` is empty where no pool of two fits.

    ``hot`` keeps fixed bounds, ``hot_per_batch`` is its first pool with bounds chosen for every batch. ``num_feasible``
    of ``num_candidates`` static strategies can hold the longest sequence; the slow ones were not priced.
    """

    statics: tuple[Prediction, ...]
    hot: tuple[Prediction, ...]
    hot_per_batch: Prediction | None
    gain: Gain | None
    gain_per_batch: Gain | None
    longest_tokens: int
    num_candidates: int
    num_feasible: int
    num_pools_compared: int

    @property
    def advises_hot(self) -> bool:
        return self.gain is not None and self.gain.worth_switching

    @property
    def chosen(self) -> Prediction:
        return self.hot[0] if self.advises_hot else self.statics[0]

    @property
    def chosen_per_batch(self) -> Prediction:
        """What to use where every batch is divided by its own lengths."""
        gain = self.gain_per_batch
        return self.hot[0] if gain is not None and gain.worth_switching else self.statics[0]


def make_plan(
    model: StepModel,
    draw: Callable[[int], np.ndarray],
    *,
    recompute: Sequence[str] = ("none", "full"),
    longest_tokens: int | None = None,
) -> Plan:
    """Searches pools and static strategies for batches that ``draw(seed)`` gives (lengths in tokens).

    Both are searched over the same candidates, packed and balanced alike, and priced on the same fresh batches.
    ``longest_tokens`` (default: the longest drawn) must be held. ValueError where nothing fits, with what would.
    """
    search_batches = [draw(seed) for seed in range(NUM_SEARCH_BATCHES)]
    check_batches = [draw(CHECK_SEED + seed) for seed in range(NUM_CHECK_BATCHES)]
    longest = max(int(lengths.max()) for lengths in (*search_batches, *check_batches))
    longest = max(longest, longest_tokens or 0)
    # so that bounds end where the longest sequence that may come does
    search_batches[0] = np.append(search_batches[0][1:], longest)
    candidates = candidate_strategies(model.profile, model.num_ranks, recompute=recompute)
    check_lengths(model, candidates, longest)
    search = PoolSearch(model, candidates, search_batches)
    statics = search.static()
    pools = [found for found in search.hot() if _mixes(found.pool, check_batches)]
    if not statics:
        check_lengths(model, candidates, longest)

    def priced(found: Sequence) -> tuple[Prediction, ...]:
        predictions = [predict(model, f.pool, check_batches) for f in found[:NUM_PRICED]]
        return tuple(sorted(predictions, key=lambda p: p.mean.total_s))

    static, hot = priced(statics), priced(pools)
    if hot:
        finer = refine_bounds(model, hot[0].pool, search.cuts_tokens, search_batches[:NUM_REFINE_BATCHES])
        if finer != hot[0].pool:
            finer_hot = predict(model, finer, check_batches)
            hot = tuple(sorted((finer_hot, *hot), key=lambda p: p.mean.total_s))[: len(hot)]
    per_batch = predict(model, hot[0].pool, check_batches, per_batch=True) if hot else None
    gain = gain_per_batch = None
    if hot:
        error = _model_error(model, static[0].pool, hot[0].pool)
        gain = Gain.between(static[0], hot[0], model_error=error)
        gain_per_batch = Gain.between(static[0], per_batch, model_error=error)
    return Plan(
        statics=static,
        hot=hot,
        hot_per_batch=per_batch,
        gain=gain,
        gain_per_batch=gain_per_batch,
        longest_tokens=longest,
        num_candidates=len(candidates),
        num_feasible=len(statics),
        num_pools_compared=len(pools),
    )


def _mixes(pool: PlannedPool, batches: Sequence[np.ndarray]) -> bool:
    """Whether some batch fills two buckets; else a pool is a static strategy that keeps its state elsewhere."""
    bounds = [entry.bound_tokens for entry in pool.entries]
    return any(len(np.unique(np.searchsorted(bounds, lengths, side="left"))) > 1 for lengths in batches)


def refine_bounds(
    model: StepModel, pool: PlannedPool, cuts_tokens: np.ndarray, batches: Sequence[np.ndarray]
) -> PlannedPool:
    """``pool`` with inner bounds moved along ``cuts_tokens`` while real assignments of ``batches`` get faster.

    Large batches are estimated anyway, as the search did: then the pool comes back as it is.
    """
    if len(batches[0]) > MAX_ASSIGNED_SEQUENCES:
        return pool

    def seconds(candidate: PlannedPool) -> float:
        return predict(model, candidate, batches).mean.total_s

    best_s, improved = seconds(pool), True
    while improved:
        improved = False
        for index in range(len(pool.entries) - 1):
            for cut in _neighbours(pool, index, cuts_tokens):
                entries = list(pool.entries)
                entries[index] = dataclasses.replace(entries[index], bound_tokens=cut)
                moved = dataclasses.replace(pool, entries=tuple(entries))
                moved_s = seconds(moved)
                if moved_s < best_s * (1 - 1e-4):
                    pool, best_s, improved = moved, moved_s, True
                    break
    return pool


def _neighbours(pool: PlannedPool, index: int, cuts_tokens: np.ndarray) -> list[int]:
    """The next cuts below and above one bound that keep bounds in order and micro-batches large enough."""
    low = pool.entries[index - 1].bound_tokens if index else 0
    high = min(pool.entries[index + 1].bound_tokens - 1, pool.micro_batch_tokens[index])
    now = pool.entries[index].bound_tokens
    below = [int(c) for c in cuts_tokens if low < c < now][-1:]
    above = [int(c) for c in cuts_tokens if now < c <= high][:1]
    return below + above


def _model_error(model: StepModel, *pools: PlannedPool) -> float:
    profile = model.profile
    stages = [profile.stage(entry.strategy) for pool in pools for entry in pool.entries]
    return max(profile.time_error if s.time_error is None else s.time_error for s in stages)
