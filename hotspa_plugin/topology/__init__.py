"""Rank grids in Megatron's order, and the cluster of nodes and network cards below them."""

from hotspa_plugin.topology.cluster import Cluster, cards_of_nodes
from hotspa_plugin.topology.rank_grid import AXES, DEFAULT_ORDER, Coordinate, RankGrid

__all__ = ["AXES", "DEFAULT_ORDER", "Cluster", "Coordinate", "RankGrid", "cards_of_nodes"]
