"""Measuring switches over a real process group against what the wire and memory allow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.plan import ReshardPlan
from hotspa_plugin.resharding.rounds import rounds_of_rank
from hotspa_plugin.resharding.staging_buffer import StagingBuffer
from hotspa_plugin.resharding.transports.torch_distributed import TorchDistributedTransport

TORCH_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
}


def allocate_tensors(layout: ShardLayout, rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """One line of random elements per local parameter of a rank, as long as its shards reach."""
    lengths: dict[str, tuple[int, torch.dtype]] = {}
    for shard in layout.shards(rank):
        reach = 1 + shard.storage_offset
        reach += sum((n - 1) * s for n, s in zip(shard.region.shape, shard.strides, strict=True))
        known = lengths.get(shard.parameter, (0, None))[0]
        lengths[shard.parameter] = max(known, reach), TORCH_DTYPES[layout.tensors[shard.tensor].dtype]
    return {name: torch.randn(n, device=device).to(dtype) for name, (n, dtype) in lengths.items()}


class RawExchange:
    """An all-to-all of as many bytes per pair of ranks as a plan moves, and a copy of the bytes it must rearrange."""

    def __init__(self, plan: ReshardPlan, rank: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        sent = np.zeros(plan.num_ranks, dtype=np.int64)
        received = np.zeros(plan.num_ranks, dtype=np.int64)
        copied = 0
        sizes = np.array([spec.item_size_bytes for spec in plan.source.tensors])
        for round_ in rounds_of_rank(plan, rank):
            moves = round_.moves
            num_bytes = moves.num_elements * sizes[moves.tensor]
            is_sent, is_received = moves.source_rank == rank, moves.destination_rank == rank
            np.add.at(sent, moves.destination_rank[is_sent & ~is_received], num_bytes[is_sent & ~is_received])
            np.add.at(received, moves.source_rank[is_received & ~is_sent], num_bytes[is_received & ~is_sent])
            copied += int(num_bytes[is_sent & is_received].sum())
            copied += int(num_bytes[is_sent & ~is_received & ~round_.source.contiguous].sum())
            copied += int(num_bytes[is_received & ~is_sent & ~round_.destination.contiguous].sum())
        self.copied_bytes = copied
        self._splits = received.tolist(), sent.tolist()

        def line(num_bytes: int) -> torch.Tensor:
            # Memory that was never written would be read from one page of zeros, out of the cache.
            return torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(rank + 1)

        self._receive, self._send = line(int(received.sum())), line(int(sent.sum()))
        self._copy = line(copied), line(copied)

    def all_to_all(self) -> None:
        """Moves the bytes between the ranks, from one buffer into one buffer."""
        dist.all_to_all_single(self._receive, self._send, *self._splits, group=self._group)

    def copy(self) -> None:
        """Copies the bytes that lie scattered at either end, and those that stay on their rank, from line to line."""
        self._copy[1].copy_(self._copy[0])


def measure_switch(
    plan: ReshardPlan,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    num_rounds: int = 10,
    others: Mapping[str, Callable[[], object]] | None = None,
    tensors: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]] | None = None,
) -> dict[str, float]:
    """Median seconds (of the slowest rank each time) of a switch and of what it is compared with.

    All contenders run in turn in every round: ``switch_s``, ``raw_all_to_all_s``, ``raw_copy_s``, and ``others`` by
    their own names. Called on all ranks of ``group``; returns the same on all of them.
    """
    rank = dist.get_rank(group)
    device = device or torch.device("cpu")
    source, destination = tensors or (
        allocate_tensors(plan.source, rank, device),
        allocate_tensors(plan.destination, rank, device),
    )
    executor = ReshardExecutor(
        plan, rank, TorchDistributedTransport(group), source, destination, staging=StagingBuffer()
    )
    raw = RawExchange(plan, rank, group, device)
    contenders: dict[str, Callable[[], object]] = {
        "switch_s": executor.run,
        "raw_all_to_all_s": raw.all_to_all,
        "raw_copy_s": raw.copy,
        **(others or {}),
    }
    return measure_in_turn(contenders, num_rounds=num_rounds, group=group, device=device)


def measure_in_turn(
    contenders: Mapping[str, Callable[[], object]],
    *,
    num_rounds: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> dict[str, float]:
    """Median seconds (of the slowest rank each time) of contenders that take turns in every round.

    One more round, the first, warms up.     Called on all ranks of ``group``; returns the same on all of them.
    """
    device = device or torch.device("cpu")
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(num_rounds + 1):  # the first one warms up
        for name, contender in contenders.items():
            dist.barrier(group)
            began = time.perf_counter()
            contender()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device)
            dist.all_reduce(taken, dist.ReduceOp.MAX, group=group)
            if turn:
                seconds[name].append(float(taken))
    return {name: statistics.median(values) for name, values in seconds.items()}
