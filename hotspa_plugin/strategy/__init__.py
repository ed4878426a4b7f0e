"""Parallel strategies, pools of them with length bounds, and what they ask of a model."""

from hotspa_plugin.strategy.checks import check_model, padded_vocab_size
from hotspa_plugin.strategy.model_shape import ModelShape
from hotspa_plugin.strategy.parallel_strategy import ParallelStrategy, refuse_unsupported
from hotspa_plugin.strategy.pool import PoolEntry, StrategyPool

__all__ = [
    "ModelShape",
    "ParallelStrategy",
    "PoolEntry",
    "StrategyPool",
    "check_model",
    "padded_vocab_size",
    "refuse_unsupported",
]
