"""Merging what is alike: nodes of equal make-up, ranks of equal role in them, and groups of cells of equal demand.

Ranks that hold the same under both layouts, on nodes (and network cards) of the same make-up, can be exchanged
without changing a plan's cost. The linear programs therefore need one set of variables per role, not per rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import DESTINATION, SOURCE, CellTable


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodeClass:
    """Nodes of equal make-up.

    ``ranks`` has shape ``[num_nodes, ranks_per_node]``; all ranks of a column have the same role.
    """

    ranks: np.ndarray
    columns_of_role: tuple[np.ndarray, ...]
    source_holding: tuple[int, ...]  # per role
    destination_holding: tuple[int, ...]  # per role
    card_class: tuple[int, ...]  # per role: which kind of network card of the node its ranks use
    num_cards: tuple[int, ...]  # per kind of card: how many the node has

    @property
    def num_nodes(self) -> int:
        return len(self.ranks)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Demand:
    """Groups of cells that the same holdings can send and the same holdings want.

    Their bytes form one line: span i covers ``[span_start[i], span_start[i + 1])`` of it and is group ``groups[i]``,
    which begins at ``position[i]`` on the cells' line of elements.
    """

    groups: tuple[int, ...]
    span_start: np.ndarray  # [num_spans + 1], bytes
    position: np.ndarray  # [num_spans], elements
    item_size_bytes: np.ndarray  # [num_spans]
    sources: frozenset[int]  # holdings of the source layout that can send
    destinations: frozenset[int]  # holdings of the destination layout that want it

    @property
    def num_bytes(self) -> int:
        return int(self.span_start[-1])

    def snap(self, offsets: np.ndarray, cells: CellTable) -> np.ndarray:
        """The closest offsets (bytes along the demand's line) at which cells may be cut."""
        offsets = np.clip(np.asarray(offsets, dtype=np.float64), 0, self.num_bytes)
        span = np.clip(np.searchsorted(self.span_start, offsets, side="right") - 1, 0, len(self.groups) - 1)
        elements = np.rint((offsets - self.span_start[span]) / self.item_size_bytes[span]).astype(np.int64)
        snapped = cells.snap(self.position[span] + elements)
        return self.span_start[span] + (snapped - self.position[span]) * self.item_size_bytes[span]


def _dense(rows: Sequence[bytes] | np.ndarray) -> list[int]:
    """A small number for each of several keys, equal for equal keys, in order of first appearance."""
    index: dict = {}
    return [index.setdefault(row, len(index)) for row in rows]


def classify_nodes(
    source: ShardLayout, destination: ShardLayout, node_of_rank: np.ndarray, card_of_rank: np.ndarray
) -> tuple[NodeClass, ...]:
    """Sorts all nodes by their make-up. ``card_of_rank`` numbers cards over all nodes."""
    num_destination = len(destination.holdings)
    pair = source.holding_of_rank.astype(np.int64) * num_destination + destination.holding_of_rank
    ranks = np.arange(len(pair))

    # What a card's ranks hold names the card's kind; that together with what a rank holds names its role.
    order = np.lexsort((ranks, pair, card_of_rank))
    pieces = np.split(order, np.flatnonzero(np.diff(card_of_rank[order])) + 1)
    kind_of_rank = np.empty(len(pair), dtype=np.int64)
    for kind, piece in zip(_dense([pair[piece].tobytes() for piece in pieces]), pieces, strict=True):
        kind_of_rank[piece] = kind

    order = np.lexsort((ranks, kind_of_rank, pair, node_of_rank))
    pieces = np.split(order, np.flatnonzero(np.diff(node_of_rank[order])) + 1)
    classes: dict[bytes, list[np.ndarray]] = {}
    for piece in pieces:
        classes.setdefault(pair[piece].tobytes() + b"|" + kind_of_rank[piece].tobytes(), []).append(piece)
    found = []
    for nodes in classes.values():
        table = np.stack(nodes)
        columns: dict[tuple[int, int], list[int]] = {}
        for column, rank in enumerate(table[0].tolist()):
            columns.setdefault((int(pair[rank]), int(kind_of_rank[rank])), []).append(column)
        kinds = sorted({kind for _, kind in columns})
        cards = [len(np.unique(card_of_rank[table[0]][kind_of_rank[table[0]] == kind])) for kind in kinds]
        found.append(
            NodeClass(
                ranks=table,
                columns_of_role=tuple(np.array(c) for c in columns.values()),
                source_holding=tuple(p // num_destination for p, _ in columns),
                destination_holding=tuple(p % num_destination for p, _ in columns),
                card_class=tuple(kinds.index(kind) for _, kind in columns),
                num_cards=tuple(cards),
            )
        )
    return tuple(found)


def gather_demands(
    cells: CellTable, groups: Sequence[int], source_allowed: np.ndarray | None = None
) -> tuple[Demand, ...]:
    """Merges groups with the same senders and the same takers.

    ``source_allowed``, a mask over the source side's incidences, leaves out copies that must not send.
    """
    merged: dict[tuple[bytes, bytes], list[int]] = {}
    holdings: dict[tuple[bytes, bytes], tuple[np.ndarray, np.ndarray]] = {}
    for group in groups:
        cell = int(cells.first_of_group[group])
        rows = cells.sides[SOURCE].of_cell(cell)
        senders = cells.sides[SOURCE].holding[rows]
        if source_allowed is not None:
            senders = senders[source_allowed[rows]]
        takers = cells.sides[DESTINATION].holding[cells.sides[DESTINATION].of_cell(cell)]
        key = senders.tobytes(), takers.tobytes()
        merged.setdefault(key, []).append(group)
        holdings[key] = senders, takers
    found = []
    for key, members in merged.items():
        first = cells.start[cells.first_of_group[members]]
        last = cells.start[cells.first_of_group[np.array(members) + 1]]
        sizes = cells.item_size_bytes[members]
        found.append(
            Demand(
                groups=tuple(members),
                span_start=np.concatenate([[0], np.cumsum((last - first) * sizes)]),
                position=first,
                item_size_bytes=sizes,
                sources=frozenset(holdings[key][0].tolist()),
                destinations=frozenset(holdings[key][1].tolist()),
            )
        )
    return tuple(found)
