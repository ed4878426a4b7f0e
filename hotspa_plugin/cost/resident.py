"""The memory of a rank that is certain before a run: home, the slab, and the staging of a switch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hotspa_plugin.layout import gpt_layout
from hotspa_plugin.layout.analytic import GPTSizes
from hotspa_plugin.layout.types import ITEM_SIZE_BYTES
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool

_GRADIENT_BYTES = 4  # accumulated in fp32
_ADAM_STATE_BYTES = 8  # two fp32 moments
_MASTER_BYTES = 4  # fp32 copies of parameters that are kept in less


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes on the fullest rank while one strategy's bucket runs; activations come on top."""

    strategy: str
    home_bytes: int  # parameters, gradients, optimizer state
    slab_bytes: int  # parameters and gradients of the strategy, and of others that are on their way meanwhile
    staging_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.home_bytes + self.slab_bytes + self.staging_bytes


def describe_shortage(memory: Sequence[ResidentMemory], available_bytes: int) -> str:
    """The strategy that needs most, with the figures and what would need less; more ways out may follow the text."""
    fullest = max(memory, key=lambda entry: entry.total_bytes)
    gib = 2**30
    return (
        f"strategy {fullest.strategy} needs {fullest.total_bytes / gib:.2f} GiB a rank before any activation (home "
        f"{fullest.home_bytes / gib:.2f}, slab {fullest.slab_bytes / gib:.2f}, "
        f"switch {fullest.staging_bytes / gib:.2f}), but a rank has {available_bytes / gib:.2f} GiB here: take a home "
        "or strategy with more tensor or pipeline parallel"
    )


def resident_memory(
    sizes: GPTSizes,
    pool: StrategyPool,
    *,
    distributed_optimizer: bool,
    staging_bytes: int,
    overlap_flush: bool = False,
    overlap_prefetch: bool = False,
) -> tuple[ResidentMemory, ...]:
    """One entry per strategy of a checked ``pool``, for AdamW with fp32 gradients in home and slab.

    Where flushes overlap, another strategy's gradients stand beside each strategy; where parameters are fetched
    ahead, another strategy's parameters do, but not beside home.
    """
    item_bytes = ITEM_SIZE_BYTES[sizes.dtype]
    home = pool.strategies[pool.home_index]
    state_bytes = _ADAM_STATE_BYTES + (_MASTER_BYTES if item_bytes < _MASTER_BYTES else 0)
    if distributed_optimizer:
        state_bytes /= home.dp
    held = {strategy: _fullest_rank(sizes, strategy) for strategy in pool.strategies if strategy != home}

    def slab_bytes(strategy: ParallelStrategy) -> int:
        largest = max((count for other, count in held.items() if other != strategy), default=0)
        if strategy == home:
            return largest * _GRADIENT_BYTES * overlap_flush
        beside = largest * (_GRADIENT_BYTES * overlap_flush + item_bytes * overlap_prefetch)
        return held[strategy] * (item_bytes + _GRADIENT_BYTES) + beside

    home_bytes = math.ceil(_fullest_rank(sizes, home) * (item_bytes + _GRADIENT_BYTES + state_bytes))
    return tuple(
        ResidentMemory(
            strategy=str(strategy),
            home_bytes=home_bytes,
            slab_bytes=slab_bytes(strategy),
            staging_bytes=staging_bytes if len(pool.strategies) > 1 else 0,
        )
        for strategy in pool.strategies
    )


def num_parameters(sizes: GPTSizes) -> int:
    """Parameters of the model, tied ones counted once."""
    return _fullest_rank(sizes, ParallelStrategy(tp=1, pp=1))


def _fullest_rank(sizes: GPTSizes, strategy: ParallelStrategy) -> int:
    """Parameters held by the rank that holds most."""
    layout = gpt_layout(sizes, tp=strategy.tp, pp=strategy.pp, dp=1)
    return max(sum(shard.region.num_elements for shard in holding) for holding in layout.holdings)
