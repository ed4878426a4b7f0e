"""Choosing strategies: the pool of a run, and each batch's own division over it."""

from hotspa_plugin.search.ahead import AheadAssigner
from hotspa_plugin.search.auto_pool import AUTO, ChosenPool, assigner_for, choose_pool, draw_from
from hotspa_plugin.search.batch_assignment import BatchAssigner, StrategyOption
from hotspa_plugin.search.lengths import LengthSource
from hotspa_plugin.search.paper import PaperSetting, paper_settings
from hotspa_plugin.search.planning import Gain, Plan, Prediction, make_plan, predict
from hotspa_plugin.search.pool_search import (
    Found,
    PoolSearch,
    candidate_strategies,
    check_lengths,
    possible_strategies,
)
from hotspa_plugin.search.simulation import PaperPool, Simulated, simulate
from hotspa_plugin.search.step_model import PlannedPool, StepModel

__all__ = [
    "AUTO",
    "AheadAssigner",
    "BatchAssigner",
    "ChosenPool",
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
    "assigner_for",
    "candidate_strategies",
    "check_lengths",
    "choose_pool",
    "draw_from",
    "make_plan",
    "paper_settings",
    "possible_strategies",
    "predict",
    "simulate",
]
