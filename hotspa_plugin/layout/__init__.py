"""Shard layouts: which box of which global tensor each rank holds, and where it lies locally."""

from hotspa_plugin.layout.analytic import GPTSizes, gpt_layout
from hotspa_plugin.layout.types import GradientClass, Holding, Region, Shard, ShardLayout, TensorSpec

__all__ = ["GPTSizes", "GradientClass", "Holding", "Region", "Shard", "ShardLayout", "TensorSpec", "gpt_layout"]
