import pytest

from hotspa_plugin.process_groups import GroupSpec, plan_groups
from hotspa_plugin.strategy import StrategyPool
from hotspa_plugin.topology import RankGrid


def grids(spec, world_size):
    return [RankGrid(strategy=strategy, world_size=world_size) for strategy in StrategyPool.parse(spec)]


def test_every_group_once_and_the_world_first():
    plan = plan_groups(grids("tp1:64 tp2:128 tp2pp2:256 tp4:512", 4))
    ranks = [group.ranks for group in plan.groups]
    assert ranks[0] == (0, 1, 2, 3)
    assert len(set(ranks)) == len(ranks)
    # singles, pairs of tp2 (tp) and of tp2 (dp) = tp2pp2 (pp), and the world
    assert sorted(ranks) == [(0,), (0, 1), (0, 1, 2, 3), (0, 2), (1,), (1, 3), (2,), (2, 3), (3,)]


def test_every_strategy_finds_its_groups():
    everything = grids("tp1:1 tp2pp2:2 tp4pp2:3 pp8:4", 8)
    planned = {group.ranks for group in plan_groups(everything).groups}
    for grid in everything:
        for axes in ("tp", "pp", "dp", "cp", "tp-pp", "tp-dp", "dp-cp", "tp-cp", "tp-dp-cp"):
            assert planned.issuperset(grid.groups(axes))
        assert planned.issuperset(grid.embedding_groups())
        assert planned.issuperset(grid.position_embedding_groups())


def test_second_backend_and_extra():
    plan = plan_groups(grids("tp2:1", 4), second_backend="gloo", extra=[(1, 2)])
    gloo = [group.ranks for group in plan.groups if group.backend == "gloo"]
    assert gloo == [(0, 2), (1, 3)]
    assert plan.groups[-1] == GroupSpec(ranks=(1, 2))
    assert GroupSpec(ranks=(1, 2)) in plan.groups_of(1)
    assert GroupSpec(ranks=(1, 2)) not in plan.groups_of(0)


def test_digest_depends_on_content_and_order():
    one, other = grids("tp1:1 tp2:2 pp4:3", 4), grids("tp1:1 pp4:2 tp2:3", 4)
    assert plan_groups(one).digest() == plan_groups(grids("tp1:5 tp2:6 pp4:7", 4)).digest()
    assert plan_groups(one).digest() != plan_groups(other).digest()
    assert plan_groups(one).digest() != plan_groups(one, extra=[(1, 2)]).digest()


def test_errors():
    with pytest.raises(ValueError, match="share one world size"):
        plan_groups([*grids("tp1:1", 2), *grids("tp1:1", 4)])
    with pytest.raises(ValueError, match="share one world size"):
        plan_groups([])
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4"):
        plan_groups(grids("tp1:1", 4), extra=[(0, 4)])
    for ranks in [(), (1, 0), (1, 1), (-1, 0)]:
        with pytest.raises(ValueError, match="ascending order"):
            GroupSpec(ranks=ranks)
