"""Measures what the links between the ranks of this world carry."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from hotspa_plugin.cost.profile import LinkFigures, Rate

LINK_BYTES = 16 * 2**20


def largest_of_ranks(value: float) -> float:
    """The largest of all ranks' values; collective."""
    tensor = torch.tensor([value], dtype=torch.float64, device=torch.cuda.current_device())
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _timed(action: Callable[[], object], device: torch.device, num_rounds: int = 5) -> float:
    """Median over rounds of the slowest rank's seconds."""
    seconds = []
    for turn in range(num_rounds + 1):
        dist.barrier()
        started_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken_s = largest_of_ranks(time.perf_counter() - started_s)
        if turn:
            seconds.append(taken_s)
    return statistics.median(seconds)


def measure_links(device: torch.device) -> LinkFigures:
    """Bandwidths among this world's ranks; between nodes those of the whole world, where it has several."""
    num_ranks = dist.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    groups = {size: dist.new_subgroups(group_size=size)[0] for size in _group_sizes(num_ranks, per_node)}
    exchange, reduce = {}, {}
    for size, group in groups.items():
        count = LINK_BYTES // (4 * size) * size
        sent = torch.ones(count, device=device)
        received = torch.empty_like(sent)
        taken_s = _timed(lambda g=group, r=received, s=sent: dist.all_to_all_single(r, s, group=g), device)
        exchange[size] = 4 * count * (size - 1) / size / taken_s
        taken_s = _timed(lambda g=group, s=sent: dist.all_reduce(s, group=g), device)
        reduce[size] = 4 * count * 2 * (size - 1) / size / taken_s
    for group in groups.values():
        dist.destroy_process_group(group)
    few = torch.ones(num_ranks, device=device)
    latency_s = _timed(lambda: dist.all_to_all_single(torch.empty_like(few), few), device) if num_ranks > 1 else 0.0
    line, copy = torch.ones(LINK_BYTES, device=device), torch.empty(LINK_BYTES, device=device)
    copy_bytes_per_s = 4 * LINK_BYTES / _timed(lambda: copy.copy_(line), device)
    if not exchange:  # one rank: nothing will be sent, but a profile says something
        exchange, reduce = {1: copy_bytes_per_s}, {1: copy_bytes_per_s}

    def rates(values: dict[int, float], keep: Callable[[int], bool], rename: Callable[[int], int]) -> tuple[Rate, ...]:
        chosen = {rename(n): rate for n, rate in values.items() if keep(n)} or {max(values): values[max(values)]}
        return tuple(Rate(num_ranks=n, bytes_per_s=rate) for n, rate in sorted(chosen.items()))

    return LinkFigures(
        cards_per_node=1,
        intra_node=rates(exchange, lambda n: n <= per_node, lambda n: n),
        # A card carries what all ranks of a node send to other nodes.
        inter_node=tuple(
            Rate(num_ranks=r.num_ranks, bytes_per_s=r.bytes_per_s * per_node * (1 - per_node / num_ranks))
            if num_ranks > per_node else r
            for r in rates(exchange, lambda n: n > per_node, lambda n: n)
        ),
        all_reduce_in_node=rates(reduce, lambda n: n <= per_node, lambda n: n),
        all_reduce_between_nodes=rates(reduce, lambda n: n > per_node, lambda n: per_node),
        copy_bytes_per_s=copy_bytes_per_s,
        latency_s=latency_s,
        note="" if num_ranks > per_node else "measured on one node: rates between nodes repeat those inside",
    )  # fmt: skip


def _group_sizes(num_ranks: int, per_node: int) -> list[int]:
    sizes = [n for n in range(2, per_node + 1) if num_ranks % n == 0 and per_node % n == 0]
    return sizes + ([num_ranks] if num_ranks > per_node else [])
