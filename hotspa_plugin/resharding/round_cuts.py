"""Cutting a plan into rounds that fit a memory budget: the same cuts on every rank, from the plan alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import shard_table
from hotspa_plugin.resharding.plan import ReshardPlan, Routes

# A row of at least so many elements is a message of its own, which can go straight from or to its place;
# smaller ones are packed together, since a message costs more than copying them.
DIRECT_ELEMENTS = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Loads:
    """Bytes that each rank stages for each cell, sorted by rank, then cell."""

    rank_start: np.ndarray  # [num_ranks + 1], rows of each rank
    key: np.ndarray  # rank * (num_cells + 1) + cell, ascending
    total: np.ndarray  # [num_rows + 1], bytes up to each row
    num_cells: int

    def up_to(self, cell: int) -> np.ndarray:
        """Per rank: ``total`` before its first row of ``cell`` or a later one."""
        ranks = np.arange(len(self.rank_start) - 1)
        return self.total[np.searchsorted(self.key, ranks * (self.num_cells + 1) + cell)]

    def reach(self, cell: int, budget: int) -> int:
        """The last cell boundary up to which no rank stages more than ``budget`` from boundary ``cell`` on."""
        limit = self.up_to(cell) + budget
        row = np.searchsorted(self.total, limit, side="right") - 1  # the first row that does not fit any more
        full = row < self.rank_start[1:]
        if not full.any():
            return self.num_cells
        return int((self.key[row[full]] % (self.num_cells + 1)).min())


def item_sizes(plan: ReshardPlan) -> np.ndarray:
    """Bytes per element that a plan's staging is reckoned with, per group: in a flush at least those of fp32."""
    sizes = plan.cells.item_size_bytes
    return np.maximum(sizes, 4) if plan.accumulate else sizes


def cut_rounds(plan: ReshardPlan, hop: int, memory_budget_bytes: int | None, *, stage_all: bool = False) -> np.ndarray:
    """Positions that cut a hop into rounds, ascending: one round without a budget.

    Rounds end where cells end, except where one cell alone exceeds the budget. All contributions to one element
    fall into one round. With ``stage_all`` every element between ranks counts as staged.
    Raises ValueError where one row of a tensor exceeds the budget.
    """
    cells = plan.cells
    end = int(cells.start[-1])
    routes = plan.routes
    routes = routes.select((routes.hop == hop) & (routes.source_rank != routes.destination_rank))
    if memory_budget_bytes is None or len(routes) == 0:
        return np.array([0, end], dtype=np.int64)
    route, cell, elements = _rows(plan, routes)
    weight = item_sizes(plan)[cells.group[cell]] * elements
    sent, received = _staged_at_both_ends(plan, routes, route, cell, elements)
    if stage_all:
        sent, received = np.ones_like(sent), np.ones_like(received)
    loads = _loads(plan, routes, route, cell, weight * sent, weight * received)
    cuts, at = [0], 0
    while at < len(cells.tensor):
        reach = loads.reach(at, memory_budget_bytes)
        if reach > at:
            at = reach
            cuts.append(int(cells.start[at]))
            continue
        inside = cell == at  # pieces of a cell that is cut are small: reckon as if all were staged
        copies = _copies_on_busiest_rank(plan.num_ranks, routes, route[inside])
        row_elements = int(cells.row_elements[at])
        num_rows = (int(cells.start[at + 1]) - int(cells.start[at])) // row_elements
        row_bytes = copies * int(item_sizes(plan)[cells.group[at]]) * row_elements
        rows_per_round = memory_budget_bytes // row_bytes
        if rows_per_round == 0:
            raise ValueError(
                f"a switch memory budget of {memory_budget_bytes} bytes cannot hold one row of tensor "
                f"{plan.source.tensors[cells.tensor[at]].name}: give at least {row_bytes} bytes"
            )
        steps = np.arange(rows_per_round, num_rows, rows_per_round)
        cuts += (int(cells.start[at]) + steps * row_elements).tolist()
        at += 1
        cuts.append(int(cells.start[at]))
    return np.array(cuts, dtype=np.int64)


def _rows(plan: ReshardPlan, routes: Routes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Route, cell and number of elements of each row, without anything else that ``expand`` gives."""
    cells = plan.cells
    first = np.searchsorted(cells.start, routes.start, side="right") - 1
    counts = np.searchsorted(cells.start, routes.stop, side="left") - first
    route = np.repeat(np.arange(len(routes)), counts)
    cell = first[route] + np.arange(len(route)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum(routes.start[route], cells.start[cell])
    stop = np.minimum(routes.stop[route], cells.start[cell + 1])
    return route, cell, stop - begin


def _staged_at_both_ends(
    plan: ReshardPlan, routes: Routes, route: np.ndarray, cell: np.ndarray, elements: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Masks of the rows that the sender, and that the receiver, may have to stage."""
    small = elements < DIRECT_ELEMENTS
    found = []
    for rank, side, nth in (
        (routes.source_rank, routes.source_side, routes.source_nth),
        (routes.destination_rank, routes.destination_side, routes.destination_nth),
    ):
        scattered = np.zeros(len(route), dtype=bool)
        for which, layout in enumerate((plan.source, plan.destination)):
            rows = np.flatnonzero(side[route] == which)
            scattered[rows] = _scattered(plan, which, layout, rank[route[rows]], cell[rows], nth[route[rows]])
        found.append(small | scattered)
    sent, received = found
    return sent, np.ones_like(received) if plan.accumulate else received


def _scattered(
    plan: ReshardPlan, side: int, layout: ShardLayout, rank: np.ndarray, cell: np.ndarray, nth: np.ndarray
) -> np.ndarray:
    """Whether a cell's elements do not lie one after the other in the shard of a rank that holds it."""
    cells, holders, table = plan.cells, plan.cells.sides[side], shard_table(layout)
    at = table.row(holders.holding, holders.shard)
    shape = cells.high[holders.cell] - cells.low[holders.cell]
    contiguous = np.ones(len(at), dtype=bool)
    expected = np.ones(len(at), dtype=np.int64)
    for dim in range(shape.shape[1] - 1, -1, -1):
        contiguous &= (shape[:, dim] == 1) | (table.strides[at, dim] == expected)
        expected = expected * shape[:, dim]
    return ~contiguous[holders.find(cell, layout.holding_of_rank[rank].astype(np.int64)) + nth]


def _loads(
    plan: ReshardPlan, routes: Routes, route: np.ndarray, cell: np.ndarray, sent: np.ndarray, received: np.ndarray
) -> _Loads:
    num_cells = len(plan.cells.tensor)
    rank = np.concatenate([routes.source_rank[route], routes.destination_rank[route]]).astype(np.int64)
    num_bytes = np.concatenate([sent, received])
    key = rank * (num_cells + 1) + np.concatenate([cell, cell])
    key, inverse = np.unique(key[num_bytes > 0], return_inverse=True)
    sums = np.bincount(inverse.reshape(-1), weights=num_bytes[num_bytes > 0], minlength=len(key))
    return _Loads(
        rank_start=np.searchsorted(key, np.arange(plan.num_ranks + 1) * (num_cells + 1)),
        key=key,
        total=np.concatenate([[0], np.cumsum(sums.astype(np.int64))]),
        num_cells=num_cells,
    )


def _copies_on_busiest_rank(num_ranks: int, routes: Routes, route: np.ndarray) -> int:
    """How often the rank that has most to do sends or receives one element of a cell, at most."""
    ends = np.concatenate([routes.source_rank[route], routes.destination_rank[route]])
    return int(np.bincount(ends, minlength=num_ranks).max())
