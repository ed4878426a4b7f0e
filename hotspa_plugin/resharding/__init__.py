"""Resharding: planning and running the moves that turn one shard layout into another."""

from hotspa_plugin.resharding.bounds import SwitchCosts, plan_costs, switch_bounds, traffic
from hotspa_plugin.resharding.flush_planner import build_flush_plan
from hotspa_plugin.resharding.plan import DESTINATION, SOURCE, Moves, ReshardPlan, Routes
from hotspa_plugin.resharding.planner import POLICIES, build_switch_plan
from hotspa_plugin.resharding.rounds import predict_peak_extra_bytes
from hotspa_plugin.resharding.verifier import verify_flush, verify_switch

__all__ = [
    "DESTINATION",
    "POLICIES",
    "SOURCE",
    "Moves",
    "ReshardPlan",
    "Routes",
    "SwitchCosts",
    "build_flush_plan",
    "build_switch_plan",
    "plan_costs",
    "predict_peak_extra_bytes",
    "switch_bounds",
    "traffic",
    "verify_flush",
    "verify_switch",
]
