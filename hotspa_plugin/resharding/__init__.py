"""Resharding: planning and running the moves that turn one shard layout into another."""

from hotspa_plugin.resharding.plan import DESTINATION, SOURCE, Moves, ReshardPlan, Routes
from hotspa_plugin.resharding.planner import build_flush_plan, build_switch_plan
from hotspa_plugin.resharding.verifier import verify_flush, verify_switch

__all__ = [
    "DESTINATION",
    "SOURCE",
    "Moves",
    "ReshardPlan",
    "Routes",
    "build_flush_plan",
    "build_switch_plan",
    "verify_flush",
    "verify_switch",
]
