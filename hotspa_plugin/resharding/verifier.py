"""An oracle for reshard plans: replays every row over arrays of global indices, independently of any executor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hotspa_plugin.layout import GradientClass, Shard, ShardLayout
from hotspa_plugin.resharding.plan import DESTINATION, SOURCE, Moves, ReshardPlan

LocalArrays = dict[tuple[int, str], np.ndarray]  # (rank, local parameter) -> its elements as one line

UNTOUCHED = -1


def shard_view(array: np.ndarray, shard: Shard, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The strided view of box ``[low, high)`` of the global tensor in a local parameter's line of elements."""
    ndim = len(shard.strides)
    assert all(shard.region.low[d] <= low[d] < high[d] <= shard.region.high[d] for d in range(ndim)), (
        f"box {low} to {high} leaves the shard's region {shard.region}"
    )
    offset = shard.storage_offset + sum(int(low[d] - shard.region.low[d]) * shard.strides[d] for d in range(ndim))
    shape = tuple(int(high[d] - low[d]) for d in range(ndim))
    assert offset + sum((n - 1) * s for n, s in zip(shape, shard.strides, strict=True)) < len(array)
    strides = tuple(s * array.itemsize for s in shard.strides)
    return np.lib.stride_tricks.as_strided(array[offset:], shape=shape, strides=strides)


def local_arrays(layout: ShardLayout, fill: int) -> LocalArrays:
    """One int64 line per rank and local parameter, as long as its shards reach."""
    lengths: dict[tuple[int, str], int] = {}
    for rank in range(layout.num_ranks):
        for shard in layout.shards(rank):
            reach = 1 + shard.storage_offset
            reach += sum((n - 1) * s for n, s in zip(shard.region.shape, shard.strides, strict=True))
            lengths[rank, shard.parameter] = max(lengths.get((rank, shard.parameter), 0), reach)
    return {key: np.full(length, fill, dtype=np.int64) for key, length in lengths.items()}


def global_indices(layout: ShardLayout) -> list[np.ndarray]:
    """For each tensor an array of its shape in which every element has a number of its own, over all tensors."""
    found, first = [], 0
    for spec in layout.tensors:
        count = int(np.prod(spec.shape, dtype=np.int64))
        found.append(np.arange(first, first + count, dtype=np.int64).reshape(spec.shape))
        first += count
    return found


def _box(low: np.ndarray, high: np.ndarray, ndim: int) -> tuple[slice, ...]:
    return tuple(slice(int(low[d]), int(high[d])) for d in range(ndim))


def replay(plan: ReshardPlan, arrays: tuple[LocalArrays, LocalArrays], write: Callable) -> None:
    """Runs all rows of all hops: ``write(target_view, values, moves, row)`` for each; a hop reads before it writes."""
    layouts = (plan.source, plan.destination)
    for moves in plan.hops:
        _check_canonical(moves)
        read = []
        for row in range(len(moves)):
            side, rank = int(moves.source_side[row]), int(moves.source_rank[row])
            shard = layouts[side].shards(rank)[moves.source_shard[row]]
            view = shard_view(arrays[side][rank, shard.parameter], shard, moves.low[row], moves.high[row])
            assert layouts[side].tensors[shard.tensor].name == plan.source.tensors[moves.tensor[row]].name
            read.append(view.copy())
        for row in range(len(moves)):
            side, rank = int(moves.destination_side[row]), int(moves.destination_rank[row])
            shard = layouts[side].shards(rank)[moves.destination_shard[row]]
            view = shard_view(arrays[side][rank, shard.parameter], shard, moves.low[row], moves.high[row])
            assert layouts[side].tensors[shard.tensor].name == plan.source.tensors[moves.tensor[row]].name
            write(view, read[row], moves, row)


def _check_canonical(moves: Moves) -> None:
    keys = np.stack([moves.destination_rank, moves.source_rank, moves.tensor]).astype(np.int64)
    steps = np.diff(keys, axis=1)
    ahead = steps[0] > 0
    for later in steps[1:]:
        ahead |= (later > 0) & ~(steps[0] > 0)
    same = np.all(steps == 0, axis=0)
    assert np.all(ahead | same) or len(moves) < 2, "rows are not in canonical order"


def verify_switch(plan: ReshardPlan) -> None:
    """Checks that every element of every destination shard is written exactly once, with the right element.

    Raises AssertionError naming the first rank and parameter that are wrong.
    """
    assert not plan.accumulate
    indices = {spec.name: idx for spec, idx in zip(plan.source.tensors, global_indices(plan.source), strict=True)}
    arrays = local_arrays(plan.source, UNTOUCHED), local_arrays(plan.destination, UNTOUCHED)

    def fill(layout: ShardLayout, target: LocalArrays) -> None:
        for rank in range(layout.num_ranks):
            for shard in layout.shards(rank):
                low, high = np.array(shard.region.low), np.array(shard.region.high)
                values = indices[layout.tensors[shard.tensor].name][_box(low, high, len(low))]
                shard_view(target[rank, shard.parameter], shard, low, high)[...] = values

    def write(view: np.ndarray, values: np.ndarray, moves: Moves, row: int) -> None:
        assert moves.destination_side[row] == DESTINATION
        where = f"rank {moves.destination_rank[row]}, tensor {plan.source.tensors[moves.tensor[row]].name}"
        assert np.all(view == UNTOUCHED), f"{where}: written twice"
        assert np.all(values != UNTOUCHED), f"{where}: read before it was written"
        view[...] = values

    fill(plan.source, arrays[SOURCE])
    expected = local_arrays(plan.destination, UNTOUCHED)
    fill(plan.destination, expected)
    replay(plan, arrays, write)
    for (rank, parameter), wanted in expected.items():
        got = arrays[DESTINATION][rank, parameter]
        assert np.array_equal(got, wanted), f"rank {rank}, parameter {parameter}: wrong or missing elements"


def verify_flush(plan: ReshardPlan, *, seed: int = 0) -> None:
    """Checks that every contribution enters home exactly as often as the gradient classes ask.

    Gradients are random 64-bit integers whose sums wrap around, so that two different sets of contributions
    have different sums. Every element of home, summed over its partial copies, must hold the sum of the
    strategy's partial copies; identical copies of home must agree; frozen tensors and second stage copies of
    home must stay untouched. Raises AssertionError naming the tensor.
    """
    assert plan.accumulate
    strategy, home = plan.source, plan.destination
    random = np.random.default_rng(seed)
    arrays = local_arrays(strategy, 0), local_arrays(home, 0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return random.integers(0, 2**62, size=shape, dtype=np.int64)

    names = [spec.name for spec in strategy.tensors]
    total = {spec.name: np.zeros(spec.shape, dtype=np.int64) for spec in strategy.tensors}
    shared: dict[tuple, np.ndarray] = {}
    with np.errstate(over="ignore"):
        for rank in range(strategy.num_ranks):
            for shard in strategy.shards(rank):
                name = names[shard.tensor]
                box = _box(np.array(shard.region.low), np.array(shard.region.high), len(shard.strides))
                values = draw(shard.region.shape)
                counted = True
                if shard.gradient_class is GradientClass.IDENTICAL:
                    key = (name, shard.region, int(strategy.dp_rank[rank]), shard.stage_copy)
                    counted = key not in shared
                    values = shared.setdefault(key, values)
                if counted:
                    total[name][box] += values
                line = arrays[SOURCE][rank, shard.parameter]
                shard_view(line, shard, np.array(shard.region.low), np.array(shard.region.high))[...] = values

        def write(view: np.ndarray, values: np.ndarray, moves: Moves, row: int) -> None:
            view += values

        replay(plan, arrays, write)

        got = {spec.name: np.zeros(spec.shape, dtype=np.int64) for spec in home.tensors}
        agreed: dict[tuple, np.ndarray] = {}
        for rank in range(home.num_ranks):
            for shard in home.shards(rank):
                spec = home.tensors[shard.tensor]
                low, high = np.array(shard.region.low), np.array(shard.region.high)
                values = shard_view(arrays[DESTINATION][rank, shard.parameter], shard, low, high)
                if shard.stage_copy or not spec.trainable:
                    assert not values.any(), f"tensor {spec.name}: rank {rank} must not receive gradients"
                    continue
                counted = True
                if shard.gradient_class is GradientClass.IDENTICAL:
                    key = (spec.name, shard.region, int(home.dp_rank[rank]))
                    counted = key not in agreed
                    same = np.array_equal(agreed.setdefault(key, values.copy()), values)
                    assert same, f"tensor {spec.name}: tensor-parallel copies at home disagree at rank {rank}"
                if counted:
                    got[spec.name][_box(low, high, len(low))] += values
    for spec in home.tensors:
        if spec.trainable:
            assert np.array_equal(got[spec.name], total[spec.name]), f"tensor {spec.name}: wrong gradient sum at home"
