"""The process groups of all strategies: planned without torch, created once by the registry.

The registry needs torch and is imported by its own name, ``hotspa_plugin.process_groups.registry``.
"""

from hotspa_plugin.process_groups.plan import GROUP_AXES, GroupPlan, GroupSpec, plan_groups

__all__ = ["GROUP_AXES", "GroupPlan", "GroupSpec", "plan_groups"]
