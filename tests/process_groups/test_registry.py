"""The registry over four gloo processes, started once for all checks."""

import datetime
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hotspa_plugin.process_groups import plan_groups
from hotspa_plugin.process_groups.registry import ProcessGroupRegistry, num_live_groups
from hotspa_plugin.strategy import StrategyPool
from hotspa_plugin.topology import RankGrid

WORLD_SIZE = 4
TIMEOUT = datetime.timedelta(seconds=60)


def group_plan(spec="tp1:64 tp2:128 tp2pp2:256"):
    return plan_groups([RankGrid(strategy=s, world_size=WORLD_SIZE) for s in StrategyPool.parse(spec)])


def check_created_once(rank):
    registry, plan = ProcessGroupRegistry(timeout=TIMEOUT), group_plan()
    before = num_live_groups()
    registry.create_all(plan)
    assert registry.num_groups == len(plan)
    mine = plan.groups_of(rank)
    assert num_live_groups() - before == len(mine)
    registry.warm_up()
    for spec in plan.groups:
        group = registry.get(spec.ranks)
        assert registry.get(list(spec.ranks), backend="gloo") is group
        if rank in spec.ranks:
            assert tuple(dist.get_process_group_ranks(group)) == spec.ranks
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=group)
            assert total.item() == sum(spec.ranks)
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
    registry.create_all(plan)
    assert registry.num_groups == len(plan)
    assert num_live_groups() - before == len(mine)


def check_sealed(rank):
    registry = ProcessGroupRegistry(timeout=TIMEOUT)
    pair, own = registry.get((0, 1)), registry.get((0, 1), purpose="switch")
    assert rank > 1 or own is not pair
    registry.seal()
    assert registry.get((0, 1)) is pair and registry.get((0, 1), purpose="switch") is own
    with pytest.raises(RuntimeError, match=r"ranks \(0, 2\) over gloo was asked for after start"):
        registry.get((0, 2))
    assert registry.num_groups == 2


def check_groups_wait_as_long_as_the_world(rank):
    registry = ProcessGroupRegistry()
    for group in (registry.get((0, 1)), registry.get((0, 1), purpose="switch")):
        if rank < 2:
            assert group._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
    asked_for = registry.get((2, 3), timeout=2 * TIMEOUT)
    assert rank < 2 or asked_for._get_backend(torch.device("cpu")).options._timeout == 2 * TIMEOUT


def check_bad_ranks(rank):
    registry = ProcessGroupRegistry(timeout=TIMEOUT)
    with pytest.raises(ValueError, match="ascending order"):
        registry.get((1, 0))
    with pytest.raises(ValueError, match="the world has only 4 ranks"):
        registry.get((0, 4))
    assert registry.num_groups == 0


def check_different_plans_are_refused(rank):
    registry = ProcessGroupRegistry(timeout=TIMEOUT)
    with pytest.raises(RuntimeError, match=r"ranks \[3\] planned other groups than rank 0"):
        registry.create_all(group_plan("tp1:64 tp4:128") if rank == 3 else group_plan())
    assert registry.num_groups == 0


CHECKS = [
    check_created_once,
    check_sealed,
    check_groups_wait_as_long_as_the_world,
    check_bad_ranks,
    check_different_plans_are_refused,
]


def run_checks(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=TIMEOUT)
    for check in CHECKS:
        check(rank)
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gloo
def test_registry_over_gloo():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_checks, args=(f"{folder}/store",), nprocs=WORLD_SIZE)
