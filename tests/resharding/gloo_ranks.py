"""One process per rank: the transport cases, then whole switches and flushes, over a real process group."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from hotspa_plugin.resharding import build_flush_plan, build_switch_plan
from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.transports import TorchDistributedTransport
from hotspa_plugin.runtime.mover import BackgroundMover
from hotspa_plugin.runtime.whereabouts import gather_nodes
from tests.resharding import transport_cases
from tests.resharding.worlds import (
    LLAMA,
    SMALL,
    assert_filled,
    fill,
    layout,
    local_tensors,
    node_of_rank,
    random_globals,
    run_loopback,
)


def run(rank: int, num_ranks: int, backend: str, rendezvous: str) -> None:
    """Entry point of each process; an assertion that fails ends the launch."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=120),
    )
    other_group = dist.new_group(list(range(num_ranks)))
    dist.barrier()
    # Batched calls are what NCCL gets; on gloo they stand in for it.
    for group, batched in ((None, None), (other_group, True)):
        transport = TorchDistributedTransport(group, batched=batched)
        for case in transport_cases.CASES:
            part = case(rank, num_ranks, device)
            transport.exchange(part[0], part[1]).wait()
            transport_cases.check(case, part)
        two = [case(rank, num_ranks, device) for case in transport_cases.CASES[:2]]
        works = [transport.exchange(part[0], part[1]) for part in two]  # both under way at once
        for case, part, work in zip(transport_cases.CASES, two, works, strict=False):
            for index in reversed(range(len(part[1]))):
                work.wait_receive(index)
            transport_cases.check(case, part)
            work.wait()
    assert gather_nodes().tolist() == [0] * num_ranks  # one machine
    os.environ["GROUP_RANK"] = str(rank // 2)  # as torchrun would say it on two nodes
    assert gather_nodes().tolist() == [r // 2 for r in range(num_ranks)]
    half = dist.new_group([1, 0])
    if rank < 2:  # a group of two whose rank i is group rank i
        transport = TorchDistributedTransport(half)
        part = transport_cases.ring(dist.get_rank(half), 2, device)
        transport.exchange(part[0], part[1]).wait()
        transport_cases.check(transport_cases.ring, part)
    if backend == "gloo":
        hops = set()
        for model, home, other in (
            (LLAMA, (2, 2), (4, 1)), (SMALL, (4, 1), (1, 1)), (SMALL, (1, 2), (2, 1)), (LLAMA, (4, 1), (2, 1)),
            (LLAMA, (1, 2), (1, 1)),
        ):  # fmt: skip
            for budget in (None, 2000):
                hops |= _switch_and_flush(rank, num_ranks, model, home, other, budget)
        assert hops == {("switch", 1), ("switch", 2), ("flush", 1), ("flush", 2)}, hops
    dist.barrier()
    dist.destroy_process_group()


def _switch_and_flush(rank, num_ranks, model, home_strategy, other_strategy, budget) -> set[tuple[str, int]]:
    home, other = (
        layout(model, num_ranks, *strategy, sequence_parallel=False) for strategy in (home_strategy, other_strategy)
    )
    plan = build_switch_plan(home, other, node_of_rank=node_of_rank(num_ranks, 2))
    values = random_globals(home, 1, torch.bfloat16)
    source, destination = (local_tensors(one, rank, torch.bfloat16, float("nan")) for one in (home, other))
    fill(home, rank, source, values)
    transport = TorchDistributedTransport()
    executor = ReshardExecutor(plan, rank, transport, source, destination, budget)
    for _ in range(2):
        executor.run()
        assert_filled(other, rank, destination, values)

    # The flush must equal, bit for bit, what the loopback transport makes of the same gradients.
    flush = build_flush_plan(other, home, plan)
    gradients = [local_tensors(other, r, torch.float32, 0.1 * 3**r) for r in range(num_ranks)]
    expected = [local_tensors(home, r, torch.float32, 1.0) for r in range(num_ranks)]
    mine = {name: tensor.clone() for name, tensor in gradients[rank].items()}
    run_loopback(flush, gradients, expected)
    for batched in (True, False):
        own = {name: tensor.clone() for name, tensor in mine.items()}  # sums may meet in a strategy's gradients
        got = local_tensors(home, rank, torch.float32, 1.0)
        transport = TorchDistributedTransport(batched=batched)
        BackgroundMover().submit(ReshardExecutor(flush, rank, transport, own, got, budget)).wait()
        for name, tensor in expected[rank].items():
            assert torch.equal(got[name], tensor), name
    return {("switch", plan.num_hops), ("flush", flush.num_hops)}
