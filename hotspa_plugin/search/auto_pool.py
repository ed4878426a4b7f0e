"""The pool that ``auto`` stands for, and the assigner of batches, from a profile and the lengths of the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from hotspa_plugin.cost import Profile
from hotspa_plugin.data.assignment import Packing
from hotspa_plugin.search.batch_assignment import BatchAssigner
from hotspa_plugin.search.planning import make_plan
from hotspa_plugin.search.step_model import PlannedPool, StepModel
from hotspa_plugin.strategy import StrategyPool

AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenPool:
    """A pool, the tokens that each strategy's micro-batches may hold, what assigns its batches, and why this pool."""

    pool: StrategyPool
    micro_batch_tokens: dict[str, int]
    assigner: BatchAssigner
    why: str


def choose_pool(
    model: StepModel,
    draw: Callable[[int], np.ndarray],
    *,
    longest_tokens: int,
    per_batch: bool = True,
    packing: Packing = "packed",
) -> ChosenPool:
    """The pool with the least predicted step time for batches that ``draw(seed)`` gives; static where that is as fast.

    ``per_batch`` says that ``assigner`` will divide the batches. All ranks find the same pool. ValueError where nothing
    holds ``longest_tokens``, with what would.
    """
    plan = make_plan(model, draw, longest_tokens=longest_tokens)
    chosen = (plan.chosen_per_batch if per_batch else plan.chosen).pool
    gain = plan.gain_per_batch if per_batch else plan.gain
    if gain is None:
        why = "no pool of two strategies fits in memory"
    elif chosen.is_static:
        why = f"the best pool, {plan.hot[0].pool}, is predicted {gain.ratio:.2f} times as fast"
    else:
        why = f"predicted {gain.ratio:.2f} times as fast as static {plan.statics[0].pool}"
    return ChosenPool(
        pool=chosen.strategy_pool,
        micro_batch_tokens=_micro_batch_tokens(chosen),
        assigner=BatchAssigner(model.options(chosen), packing=packing),
        why=why,
    )


def assigner_for(
    profile: Profile, pool: StrategyPool, *, num_ranks: int, memory_limit_bytes: int | None, packing: Packing
) -> BatchAssigner:
    """Assigns batches over a given pool. ValueError where the profile lacks a strategy or it does not fit."""
    model = StepModel(profile, num_ranks=num_ranks, memory_limit_bytes=memory_limit_bytes)
    resolved = pool.check(world_size=num_ranks, model=profile.model.shape())
    return BatchAssigner(model.options(model.hot_pool(resolved.entries, resolved.home)), packing=packing)


def draw_from(
    lengths: np.ndarray, *, num_sequences: int | None = None, num_tokens: int | None = None
) -> Callable[[int], np.ndarray]:
    """Batches of the size that the run will have, drawn from the lengths of its data."""
    most = num_sequences if num_sequences is not None else max(1, num_tokens // max(1, int(lengths.min())))

    def draw(seed: int) -> np.ndarray:
        drawn = np.random.RandomState(seed % 2**32).choice(lengths, most)
        if num_tokens is None:
            return drawn
        return drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), num_tokens, side="right")))]

    return draw


def _micro_batch_tokens(pool: PlannedPool) -> dict[str, int]:
    return {str(entry.strategy): tokens for entry, tokens in zip(pool.entries, pool.micro_batch_tokens, strict=True)}
