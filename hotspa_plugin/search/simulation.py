"""Simulated steps from published figures: the paper's pools, ours, and the best static strategy on the same batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from hotspa_plugin.cost import published_profile
from hotspa_plugin.search.paper import PaperSetting
from hotspa_plugin.search.planning import (
    CHECK_SEED,
    NUM_CHECK_BATCHES,
    WORTH_SWITCHING,
    Plan,
    Prediction,
    make_plan,
    predict,
)
from hotspa_plugin.search.step_model import StepModel

Draw = Callable[[int], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperPool:
    """What became of one of the paper's pools: a prediction, or why there is none."""

    setting: PaperSetting
    prediction: Prediction | None
    misfit: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """One model on so many ranks with one context: a plan, and the paper's pools where it has any."""

    model: str
    num_ranks: int
    context_tokens: int
    global_batch_sequences: int
    slab_gradients: str
    recompute: tuple[str, ...]
    plan: Plan
    paper: tuple[PaperPool, ...]

    @property
    def best_static(self) -> Prediction:
        return self.plan.statics[0]

    @property
    def ours(self) -> Prediction:
        """The planned pool with bounds chosen for every batch, or the best static strategy where that is not slower."""
        ways = [self.best_static, *self.plan.hot[:1]]
        if self.plan.hot_per_batch is not None:
            ways.append(self.plan.hot_per_batch)
        return min(ways, key=lambda p: p.mean.total_s)

    @property
    def gain(self) -> float:
        """Best static over ours, at least 1."""
        return self.best_static.mean.total_s / self.ours.mean.total_s

    @property
    def pays(self) -> bool:
        return self.gain >= WORTH_SWITCHING


def simulate(
    model_name: str,
    num_ranks: int,
    context_tokens: int,
    draw: Draw,
    *,
    global_batch_sequences: int,
    settings: Sequence[PaperSetting] = (),
    slab_gradients: str = "fp32",
    recompute: Sequence[str] = ("none",),
    memory_limit_bytes: int | None = None,
) -> Simulated:
    """Plans for one setting and prices the paper's pools beside it. ValueError where no static strategy fits."""
    step_model = StepModel(
        published_profile(model_name),
        num_ranks=num_ranks,
        slab_gradients=slab_gradients,
        memory_limit_bytes=memory_limit_bytes,
    )
    plan = make_plan(step_model, draw, recompute=recompute, longest_tokens=context_tokens)
    check_batches = [draw(CHECK_SEED + seed) for seed in range(NUM_CHECK_BATCHES)]
    paper = [_price_paper(step_model, setting, context_tokens, check_batches) for setting in settings]
    return Simulated(
        model=model_name,
        num_ranks=num_ranks,
        context_tokens=context_tokens,
        global_batch_sequences=global_batch_sequences,
        slab_gradients=slab_gradients,
        recompute=tuple(recompute),
        plan=plan,
        paper=tuple(paper),
    )


def _price_paper(
    model: StepModel, setting: PaperSetting, context_tokens: int, batches: Sequence[np.ndarray]
) -> PaperPool:
    entries = setting.up_to(context_tokens)
    try:
        pool = model.hot_pool(entries, entries[-1].strategy)
    except ValueError as error:
        return PaperPool(setting=setting, prediction=None, misfit=str(error))
    return PaperPool(setting=setting, prediction=predict(model, pool, batches))
