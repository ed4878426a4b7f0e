"""The machines below the ranks: nodes and their network cards."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """``num_ranks`` ranks on nodes of ``ranks_per_node``, filled in rank order.

    A node's ranks share its ``cards_per_node`` network cards evenly, neighbours together. By
    default all ranks are on one node with one card. The last node may be filled in part.
    """

    num_ranks: int
    ranks_per_node: int | None = None
    cards_per_node: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_node is None:
            object.__setattr__(self, "ranks_per_node", self.num_ranks)
        for name in ("num_ranks", "ranks_per_node", "cards_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"cluster: {name} is {getattr(self, name)}, but must be at least 1")
        if self.ranks_per_node % self.cards_per_node:
            fits = [n for n in range(1, self.ranks_per_node + 1) if self.ranks_per_node % n == 0]
            raise ValueError(
                f"cluster: {self.cards_per_node} cards cannot be shared evenly by {self.ranks_per_node} ranks a node; "
                f"cards_per_node that fit: {', '.join(map(str, fits))}"
            )

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.num_ranks / self.ranks_per_node)

    @functools.cached_property
    def node_of_rank(self) -> np.ndarray:
        """Node index of every rank, int32 of shape ``[num_ranks]``."""
        return (np.arange(self.num_ranks) // self.ranks_per_node).astype(np.int32)

    @functools.cached_property
    def card_of_rank(self) -> np.ndarray:
        """Network card of every rank, counted over the whole cluster, int32 of shape ``[num_ranks]``."""
        return (np.arange(self.num_ranks) // (self.ranks_per_node // self.cards_per_node)).astype(np.int32)


def cards_of_nodes(node_of_rank: np.ndarray, cards_per_node: int) -> np.ndarray:
    """Network card of every rank, numbered over all nodes, where each node's ranks share its cards evenly.

    ``node_of_rank`` has shape ``[num_ranks]``, nodes numbered from 0; neighbours share a card. ValueError where the
    ranks of a node cannot be shared evenly.
    """
    cards = np.empty(len(node_of_rank), dtype=np.int64)
    for node in np.unique(node_of_rank):
        ranks = np.flatnonzero(node_of_rank == node)
        if len(ranks) % cards_per_node:
            raise ValueError(
                f"{cards_per_node} network cards cannot be shared evenly by the {len(ranks)} ranks of node {node}: "
                "give a number of cards that divides it"
            )
        cards[ranks] = node * cards_per_node + np.arange(len(ranks)) // (len(ranks) // cards_per_node)
    return cards
