"""Cells: the boxes that two shard layouts cut the global tensors into, grouped by who holds them.

All shard boundaries of both layouts together cut every tensor into a grid of boxes, the cells: each
shard is a union of cells. Cells that the same holdings hold in the same way behave alike in planning and
form a *group* (layers of one stage, say), so that planning costs what the groups cost. All elements of
all cells lie on one line, group by group, and a range ``[start, stop)`` of it is what a route moves.
"""

from __future__ import annotations

import dataclasses
import weakref

import numpy as np

from hotspa_plugin.layout import GradientClass, ShardLayout

SOURCE, DESTINATION = 0, 1  # which of the two layouts something refers to


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardTable:
    """All shards of a layout's holdings as arrays, one row per shard (``[num_shards]`` or ``[num_shards, ndim]``)."""

    holding: np.ndarray
    shard: np.ndarray  # index within the holding
    tensor: np.ndarray
    low: np.ndarray
    high: np.ndarray
    offset: np.ndarray
    strides: np.ndarray
    tp_copy: np.ndarray
    stage_copy: np.ndarray
    identical: np.ndarray  # bool: the gradient class along tensor parallel
    first_of_holding: np.ndarray  # row of shard 0 of each holding

    def row(self, holding: np.ndarray, shard: np.ndarray) -> np.ndarray:
        return self.first_of_holding[holding] + shard


_TABLES: weakref.WeakKeyDictionary[ShardLayout, ShardTable] = weakref.WeakKeyDictionary()


def shard_table(layout: ShardLayout) -> ShardTable:
    """The layout's shards as arrays, padded to the widest tensor with bounds 0 and 1 and stride 0; kept per layout."""
    if layout in _TABLES:
        return _TABLES[layout]
    ndim = max((len(spec.shape) for spec in layout.tensors), default=1) or 1
    shards = [shard for holding in layout.holdings for shard in holding]
    sizes = np.array([len(holding) for holding in layout.holdings], dtype=np.int64)
    padding = [(0,) * (ndim - n) for n in range(ndim + 1)]
    ones = [(1,) * (ndim - n) for n in range(ndim + 1)]

    def boxes(values: list[tuple[int, ...]]) -> np.ndarray:
        return np.array(values, dtype=np.int64).reshape(len(shards), ndim)

    first = np.concatenate([[0], np.cumsum(sizes)])[:-1] if len(sizes) else np.zeros(0, dtype=np.int64)
    table = ShardTable(
        holding=np.repeat(np.arange(len(sizes)), sizes),
        shard=np.arange(len(shards)) - np.repeat(first, sizes),
        tensor=np.array([s.tensor for s in shards], dtype=np.int64),
        low=boxes([s.region.low + padding[len(s.strides)] for s in shards]),
        high=boxes([s.region.high + ones[len(s.strides)] for s in shards]),
        offset=np.array([s.storage_offset for s in shards], dtype=np.int64),
        strides=boxes([s.strides + padding[len(s.strides)] for s in shards]),
        tp_copy=np.array([s.tp_copy for s in shards], dtype=np.int64),
        stage_copy=np.array([s.stage_copy for s in shards], dtype=np.int64),
        identical=np.array([s.gradient_class is GradientClass.IDENTICAL for s in shards], dtype=bool),
        first_of_holding=first.astype(np.int64),
    )
    _TABLES[layout] = table
    return table


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Incidences:
    """Which shard of which holding of one layout covers which cell, sorted by cell, then holding."""

    cell: np.ndarray
    holding: np.ndarray
    shard: np.ndarray
    first_of_cell: np.ndarray  # [num_cells + 1]
    key: np.ndarray  # cell * num_holdings + holding, ascending
    num_holdings: int

    def of_cell(self, cell: int) -> slice:
        return slice(int(self.first_of_cell[cell]), int(self.first_of_cell[cell + 1]))

    def find(self, cell: np.ndarray, holding: np.ndarray) -> np.ndarray:
        """Index of the first shard of ``holding`` that covers ``cell``."""
        wanted = cell * self.num_holdings + holding
        at = np.searchsorted(self.key, wanted)
        assert len(wanted) == 0 or (at.max() < len(self.key) and np.array_equal(self.key[at], wanted))
        return at


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CellTable:
    """The cells of a pair of layouts, sorted by group, tensor and place; positions count elements."""

    tensor: np.ndarray  # [num_cells], index into the source layout's tensors
    low: np.ndarray  # [num_cells, ndim]
    high: np.ndarray
    start: np.ndarray  # [num_cells + 1], position of each cell's first element
    row_elements: np.ndarray  # [num_cells]: a cell may be cut at multiples of this
    row_dim: np.ndarray  # [num_cells]: the dim along which that cuts
    group: np.ndarray  # [num_cells]
    first_of_group: np.ndarray  # [num_groups + 1], in cells
    item_size_bytes: np.ndarray  # [num_groups]
    trainable: np.ndarray  # [num_groups]
    sides: tuple[Incidences, Incidences]  # of the source and of the destination layout

    @property
    def num_groups(self) -> int:
        return len(self.first_of_group) - 1

    def bounds_of_group(self, group: int) -> tuple[int, int]:
        """First and last position of a group."""
        return int(self.start[self.first_of_group[group]]), int(self.start[self.first_of_group[group + 1]])

    def snap(self, positions: np.ndarray) -> np.ndarray:
        """The closest positions at which a cell may be cut."""
        if len(self.tensor) == 0:
            return positions
        cell = np.clip(np.searchsorted(self.start, positions, side="right") - 1, 0, len(self.tensor) - 1)
        rows = self.row_elements[cell]
        return self.start[cell] + (positions - self.start[cell] + rows // 2) // rows * rows

    def swapped(self) -> CellTable:
        """The same cells with source and destination exchanged."""
        return dataclasses.replace(self, sides=(self.sides[1], self.sides[0]))


def _mix(values: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (splitmix64): unrelated-looking sums for the comparison of sets."""
    x = values.astype(np.uint64)
    x = (x + np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def match_tensors(source: ShardLayout, destination: ShardLayout) -> np.ndarray:
    """Index in ``source.tensors`` of each of ``destination``'s tensors; ValueError where the two differ."""
    index = {spec.name: i for i, spec in enumerate(source.tensors)}
    names = {spec.name for spec in destination.tensors}
    missing = [f"{n} is not in layout {destination.label}" for n in index if n not in names]
    missing += [f"{name} is not in layout {source.label}" for name in sorted(names - set(index))]
    if missing:
        raise ValueError(f"tensor {missing[0]} ({len(missing)} missing): build both layouts from the same model")
    for spec in destination.tensors:
        other = source.tensors[index[spec.name]]
        if other != spec:
            raise ValueError(
                f"tensor {spec.name} is {other.dtype}{list(other.shape)} trainable={other.trainable} in layout "
                f"{source.label} but {spec.dtype}{list(spec.shape)} trainable={spec.trainable} in layout "
                f"{destination.label}: use one padded vocabulary and one dtype for the whole pool"
            )
    return np.array([index[spec.name] for spec in destination.tensors], dtype=np.int64)


def _edges(tensor: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct (tensor, coordinate) edges along one dim, and the edge index of each low and high."""
    span = int(high.max(initial=0)) + 1
    edges, where = np.unique(np.concatenate([tensor * span + low, tensor * span + high]), return_inverse=True)
    where = where.reshape(-1)
    return edges % span, where[: len(low)], where[len(low) :]


def cut_cells(source: ShardLayout, destination: ShardLayout) -> CellTable:
    """Cuts both layouts at all boundaries.

    Raises ValueError where a tensor differs between the layouts, or a region that the destination holds is
    held by nobody in the source.
    """
    tensor_of = match_tensors(source, destination)
    tables = (shard_table(source), shard_table(destination))
    num_source = len(tables[0].tensor)
    tensor = np.concatenate([tables[0].tensor, tensor_of[tables[1].tensor]])
    low = np.concatenate([tables[0].low, tables[1].low])
    high = np.concatenate([tables[0].high, tables[1].high])
    ndim = low.shape[1]

    edges, first, extent = [], [], []
    for dim in range(ndim):
        values, begin, end = _edges(tensor, low[:, dim], high[:, dim])
        edges.append(values)
        first.append(begin)
        extent.append(end - begin)
    counts = np.prod(np.stack(extent), axis=0, dtype=np.int64)
    row = np.repeat(np.arange(len(tensor)), counts)
    rest = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    cell_key = np.zeros(len(row), dtype=np.int64)
    places = []
    for dim in range(ndim - 1, -1, -1):
        places.append(first[dim][row] + rest % extent[dim][row])
        rest = rest // extent[dim][row]
    places.reverse()
    for dim in range(ndim):
        cell_key = cell_key * len(edges[dim]) + places[dim]
    unique_key, one_row, cell = np.unique(cell_key, return_index=True, return_inverse=True)
    cell = cell.reshape(-1)
    cell_tensor = tensor[row[one_row]]
    cell_low = np.stack([edges[dim][places[dim][one_row]] for dim in range(ndim)], axis=1)
    cell_high = np.stack([edges[dim][places[dim][one_row] + 1] for dim in range(ndim)], axis=1)

    on_destination = row >= num_source
    held = [np.zeros(len(unique_key), dtype=bool), np.zeros(len(unique_key), dtype=bool)]
    held[SOURCE][cell[~on_destination]] = True
    held[DESTINATION][cell[on_destination]] = True
    orphan = np.flatnonzero(held[DESTINATION] & ~held[SOURCE])
    if len(orphan):
        at = orphan[0]
        spec = source.tensors[cell_tensor[at]]
        rank = len(spec.shape)
        raise ValueError(
            f"tensor {spec.name}: nobody holds region {cell_low[at][:rank].tolist()} to "
            f"{cell_high[at][:rank].tolist()} in layout {source.label}, but layout {destination.label} needs it"
        )

    # Equal sets of (side, holding, copy, class) make one group; each set is compared by a sum of mixed numbers.
    item_size = np.array([spec.item_size_bytes for spec in source.tensors], dtype=np.int64)
    trainable = np.array([spec.trainable for spec in source.tensors], dtype=bool)
    mark = _mix(cell_tensor * 0 + item_size[cell_tensor] * 2 + trainable[cell_tensor])
    for side, table in enumerate(tables):
        mine = on_destination == bool(side)
        shard_row = row[mine] - side * num_source
        said = np.stack([table.holding, table.tp_copy, table.stage_copy, table.identical.astype(np.int64)])
        mixed = np.full(len(table.holding), side, dtype=np.uint64)
        for values in said:
            mixed = _mix(mixed ^ _mix(values))
        np.add.at(mark, cell[mine], mixed[shard_row])
    used = np.flatnonzero(held[DESTINATION])
    _, group_first, group_of = np.unique(mark[used], return_index=True, return_inverse=True)
    # Groups are numbered by their first cell, so that the numbering says something and hashes do not order it.
    rank_of = np.empty(len(group_first), dtype=np.int64)
    rank_of[np.argsort(group_first)] = np.arange(len(group_first))
    group = rank_of[group_of.reshape(-1)]
    order = np.argsort(group, kind="stable")
    used, group = used[order], group[order]
    new_index = np.full(len(unique_key), -1, dtype=np.int64)
    new_index[used] = np.arange(len(used))

    sides = []
    for side, table in enumerate(tables):
        mine = (on_destination == bool(side)) & (new_index[cell] >= 0)
        shard_row = row[mine] - side * num_source
        sides.append(
            _incidences(
                new_index[cell[mine]],
                table.holding[shard_row],
                table.shard[shard_row],
                len(used),
                len(table.first_of_holding),
            )
        )
    box_low, box_high = cell_low[used], cell_high[used]
    shape = box_high - box_low
    elements = np.prod(shape, axis=1, dtype=np.int64)
    row_dim = np.argmax(shape > 1, axis=1)
    num_groups = len(group_first)
    first_of_group = np.searchsorted(group, np.arange(num_groups + 1))
    tensor_of_group = cell_tensor[used[first_of_group[:-1]]]
    return CellTable(
        tensor=cell_tensor[used],
        low=box_low,
        high=box_high,
        start=np.concatenate([[0], np.cumsum(elements)]).astype(np.int64),
        row_elements=elements // np.take_along_axis(shape, row_dim[:, None], axis=1)[:, 0],
        row_dim=row_dim,
        group=group,
        first_of_group=first_of_group,
        item_size_bytes=item_size[tensor_of_group],
        trainable=trainable[tensor_of_group],
        sides=(sides[0], sides[1]),
    )


def _incidences(
    cell: np.ndarray, holding: np.ndarray, shard: np.ndarray, num_cells: int, num_holdings: int
) -> Incidences:
    order = np.lexsort((shard, holding, cell))
    cell, holding, shard = cell[order], holding[order], shard[order]
    return Incidences(
        cell=cell,
        holding=holding,
        shard=shard,
        first_of_cell=np.searchsorted(cell, np.arange(num_cells + 1)),
        key=cell * num_holdings + holding,
        num_holdings=num_holdings,
    )
