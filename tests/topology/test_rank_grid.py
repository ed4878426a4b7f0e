import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspa_plugin.strategy import ParallelStrategy
from hotspa_plugin.topology import DEFAULT_ORDER, RankGrid

TOKENS = ["tp", "pp", "dp", "cp", "tp-pp", "tp-dp", "dp-cp", "tp-cp", "tp-dp-cp", "pp-tp", "tp-cp-ep-dp-pp"]
SIZES = [(1, 1, 1, 4), (2, 1, 1, 2), (2, 1, 2, 2), (4, 1, 2, 1), (2, 2, 2, 2), (1, 2, 3, 2), (3, 2, 2, 5)]


def grid_of(tp, cp, pp, dp, order=DEFAULT_ORDER):
    return RankGrid(strategy=ParallelStrategy(tp=tp, cp=cp, pp=pp), world_size=tp * cp * pp * dp, order=order)


@pytest.mark.parametrize("order", [DEFAULT_ORDER, "tp-cp-ep-pp-dp", "pp-dp-tp-cp-ep"])
@pytest.mark.parametrize(("tp", "cp", "pp", "dp"), SIZES)
def test_groups_are_those_of_megatron(tp, cp, pp, dp, order):
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    generator = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    grid = grid_of(tp, cp, pp, dp, order)
    for token in TOKENS:
        assert grid.groups(token) == [tuple(ranks) for ranks in generator.get_ranks(token)], token
    pipelines = generator.get_ranks("pp")
    assert grid.embedding_groups() == [tuple(parallel_state.default_embedding_ranks(r)) for r in pipelines]
    assert grid.position_embedding_groups() == [
        tuple(parallel_state.default_position_embedding_ranks(r)) for r in pipelines
    ]


@pytest.mark.slow
def test_groups_are_those_of_megatron_for_every_order_and_small_size():
    parallel_state = pytest.importorskip("megatron.core.parallel_state")
    for tp, cp, pp, dp in itertools.product([1, 2, 3], repeat=4):
        for order in map("-".join, itertools.permutations(["tp", "cp", "ep", "dp", "pp"])):
            generator = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
            grid = grid_of(tp, cp, pp, dp, order)
            for token in TOKENS:
                assert grid.groups(token) == [tuple(ranks) for ranks in generator.get_ranks(token)], (order, token)


def test_small_grid_by_hand():
    grid = grid_of(tp=2, cp=1, pp=2, dp=2)
    assert grid.tp_rank.tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert grid.dp_rank.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert grid.pp_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert grid.groups("tp-pp") == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert grid.embedding_groups() == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.position_embedding_groups() == [(0,), (1,), (2,), (3,)]


orders = st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)


@given(st.tuples(*[st.integers(1, 3)] * 4), orders, st.sampled_from(TOKENS))
def test_coordinates_and_groups_agree(sizes, order, token):
    grid = grid_of(*sizes, order=order)
    groups = grid.groups(token)
    assert sorted(itertools.chain(*groups)) == list(range(grid.world_size))
    for rank in range(grid.world_size):
        at = grid.coordinate(rank)
        assert grid.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank
        assert grid.group_of(token, rank) in groups
        assert rank in grid.group_of(token, rank)
    for ranks in groups:
        assert list(ranks) == sorted(set(ranks))


def test_errors():
    grid = grid_of(tp=2, cp=1, pp=2, dp=2)
    with pytest.raises(ValueError, match="rank 8 is outside the world of 8"):
        grid.coordinate(8)
    with pytest.raises(ValueError, match="tp index 2 is outside 0 to 1"):
        grid.rank(tp=2)
    with pytest.raises(ValueError, match="'xp' is not one of"):
        grid.groups("tp-xp")
    with pytest.raises(ValueError, match="must name each of"):
        grid_of(1, 1, 1, 1, order="tp-pp")
    with pytest.raises(ValueError, match="does not divide the world size 6"):
        RankGrid(strategy=ParallelStrategy(tp=4), world_size=6)
