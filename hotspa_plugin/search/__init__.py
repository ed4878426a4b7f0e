"""Choosing strategies: the pool of a run, and each batch's own division over it."""

from hotspa_plugin.search.ahead import AheadAssigner
from hotspa_plugin.search.batch_assignment import BatchAssigner, StrategyOption
from hotspa_plugin.search.lengths import LengthSource
from hotspa_plugin.search.paper import PaperSetting, paper_settings
from hotspa_plugin.search.planning import Gain, Plan, Prediction, make_plan, predict
from hotspa_plugin.search.pool_search import Found, PoolSearch, candidate_strategies, check_lengths
from hotspa_plugin.search.simulation import PaperPool, Simulated, simulate
from hotspa_plugin.search.step_model import PlannedPool, StepModel

__all__ = [
    "AheadAssigner",
    "BatchAssigner",
    "Found",
    "Gain",
    "LengthSource",
    "PaperPool",
    "PaperSetting",
    "Plan",
    "PlannedPool",
    "PoolSearch",
    "Prediction",
    "Simulated",
    "StepModel",
    "StrategyOption",
    "candidate_strategies",
    "check_lengths",
    "make_plan",
    "paper_settings",
    "predict",
    "simulate",
]
