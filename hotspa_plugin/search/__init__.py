"""Choosing strategies: the pool of a run, and each batch's own division over it."""

from hotspa_plugin.search.batch_assignment import BatchAssigner, StrategyOption

__all__ = ["BatchAssigner", "StrategyOption"]
