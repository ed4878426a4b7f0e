"""Sending samples from the ranks that can read them to those that train on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Who reads what for whom: ``read_by_rank[r]`` lists (receiving rank, sample) in the order of sending.

    Made from facts that all ranks know, so that every rank makes the same one without communicating.
    """

    read_by_rank: tuple[tuple[tuple[int, int], ...], ...]

    def samples_between(self, reader: int, receiver: int) -> list[int]:
        return [sample for rank, sample in self.read_by_rank[reader] if rank == receiver]


def plan_exchange(
    needed_by_rank: Sequence[Sequence[int]], *, readers: Sequence[Sequence[int]] | Sequence[int], lengths: np.ndarray
) -> ExchangePlan:
    """Chooses a reader for every sample that every rank needs.

    Args:
        needed_by_rank: samples that each rank of the group trains on.
        readers: ranks that can read: one list for all samples, or a list for each sample (indexed like ``lengths``).
        lengths: tokens of every sample.

    A rank that can read a sample itself does so; else the reader with the fewest tokens to send so far does, ties to
    the lowest rank. Raises ValueError where no rank can read a sample.
    """
    num_ranks = len(needed_by_rank)
    per_sample = len(readers) > 0 and not isinstance(readers[0], (int, np.integer))
    common = () if per_sample else tuple(sorted(set(readers)))
    sent_tokens = [0] * num_ranks
    chosen: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for receiver, samples in enumerate(needed_by_rank):
        for sample in dict.fromkeys(int(sample) for sample in samples):
            able = tuple(sorted(readers[sample])) if per_sample else common
            if not able or able[0] < 0 or able[-1] >= num_ranks:
                raise ValueError(
                    f"sample {sample}: readers {list(able)} are not ranks of 0 to {num_ranks - 1}: name at least one"
                )
            reader = receiver
            if receiver not in able:
                reader = min(able, key=lambda rank: (sent_tokens[rank], rank))
                sent_tokens[reader] += int(lengths[sample])
            chosen[reader].append((receiver, sample))
    return ExchangePlan(read_by_rank=tuple(map(tuple, chosen)))


def exchange_samples(
    needed_by_rank: Sequence[Sequence[int]],
    *,
    readers: Sequence[Sequence[int]] | Sequence[int],
    lengths: np.ndarray,
    read: Callable[[int], np.ndarray],
    num_rows: int = 1,
    group: torch.distributed.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> dict[int, np.ndarray]:
    """Gives each rank the samples it needs. Collective over ``group``; all arguments but ``read`` are alike everywhere.

    Args:
        needed_by_rank, readers, lengths: see ``plan_exchange``; ranks count within the group.
        read: returns a sample's int64 rows, shape ``[num_rows, lengths[sample]]``, or ``[lengths[sample]]`` for one row
            (tokens; or tokens, labels and a 0/1 loss mask). Called at most once per sample, on readers only.
        device: where the group's backend wants its tensors, such as ``cuda`` for NCCL.

    Returns:
        Rows by sample, int64 of shape ``[num_rows, length]``, for what this rank needs.

    One all-to-all moves everything; where no sample has to move there is no communication at all.
    """
    plan = plan_exchange(needed_by_rank, readers=readers, lengths=lengths)
    rank = torch.distributed.get_rank(group)
    num_ranks = torch.distributed.get_world_size(group)
    if num_ranks != len(needed_by_rank):
        raise ValueError(f"exchange: a plan for {len(needed_by_rank)} ranks in a group of {num_ranks}")

    rows_of_sample: dict[int, np.ndarray] = {}
    for _, sample in plan.read_by_rank[rank]:
        if sample not in rows_of_sample:
            rows = np.asarray(read(sample), dtype=np.int64).reshape(num_rows, -1)
            if rows.shape[1] != lengths[sample]:
                raise ValueError(f"sample {sample}: read {rows.shape[1]} tokens, {lengths[sample]} were announced")
            rows_of_sample[sample] = rows
    received = {sample: rows_of_sample[sample] for receiver, sample in plan.read_by_rank[rank] if receiver == rank}
    if all(receiver == reader for reader, own in enumerate(plan.read_by_rank) for receiver, _ in own):
        return received

    outgoing: list[list[int]] = [[] for _ in range(num_ranks)]
    for receiver, sample in plan.read_by_rank[rank]:
        if receiver != rank:
            outgoing[receiver].append(sample)
    incoming = [plan.samples_between(reader, rank) if reader != rank else [] for reader in range(num_ranks)]
    send_sizes = [sum(num_rows * int(lengths[sample]) for sample in samples) for samples in outgoing]
    receive_sizes = [sum(num_rows * int(lengths[sample]) for sample in samples) for samples in incoming]
    parts = [rows_of_sample[sample].ravel() for samples in outgoing for sample in samples]
    send = torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)).to(device)
    receive = torch.empty(sum(receive_sizes), dtype=torch.int64, device=device)
    torch.distributed.all_to_all_single(receive, send, receive_sizes, send_sizes, group=group)
    flat = receive.cpu().numpy()
    start = 0
    for sample in (sample for samples in incoming for sample in samples):
        end = start + num_rows * int(lengths[sample])
        received[sample] = flat[start:end].reshape(num_rows, -1)
        start = end
    return received
