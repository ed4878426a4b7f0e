"""What every transport must do: each case says what a rank sends, what it receives, and what must have arrived."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotspa_plugin.resharding.transports import Message

Part = tuple[list[Message], list[Message], list[torch.Tensor]]  # sends, receives, what must be received
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def _content(source: int, destination: int, index: int, count: int, dtype: torch.dtype, device) -> torch.Tensor:
    first = 1000 * source + 100 * destination + 10 * index
    return ((torch.arange(count, device=device) + first) % 251).to(dtype)


def _part(rank: int, num_ranks: int, device, lengths: Callable[[int, int], list[int]], dtypes=DTYPES[:1]) -> Part:
    """``lengths(source, destination)`` lists the element counts of the messages of a pair, in order."""
    sends, receives, wanted = [], [], []
    for peer in range(num_ranks):
        if peer == rank:
            continue
        for index, count in enumerate(lengths(rank, peer)):
            dtype = dtypes[index % len(dtypes)]
            sends.append(Message(peer, _content(rank, peer, index, count, dtype, device)))
        for index, count in enumerate(lengths(peer, rank)):
            dtype = dtypes[index % len(dtypes)]
            receives.append(Message(peer, torch.zeros(count, dtype=dtype, device=device)))
            wanted.append(_content(peer, rank, index, count, dtype, device))
    return sends, receives, wanted


def ring(rank: int, num_ranks: int, device) -> Part:
    return _part(rank, num_ranks, device, lambda s, d: [17] if d == (s + 1) % num_ranks else [])


def unequal_all_to_all(rank: int, num_ranks: int, device) -> Part:
    return _part(rank, num_ranks, device, lambda s, d: [1 + 7 * s + 3 * d])


def several_messages_in_order(rank: int, num_ranks: int, device) -> Part:
    return _part(rank, num_ranks, device, lambda s, d: [5, 5, 5, 5, 9, 5, 1])


def mixed_dtypes(rank: int, num_ranks: int, device) -> Part:
    return _part(rank, num_ranks, device, lambda s, d: [4, 6, 8, 10, 12], DTYPES)


def most_ranks_idle(rank: int, num_ranks: int, device) -> Part:
    return _part(rank, num_ranks, device, lambda s, d: [33] if (s, d) == (0, 1) else [])


def nobody_has_anything(rank: int, num_ranks: int, device) -> Part:
    return [], [], []


def large(rank: int, num_ranks: int, device) -> Part:
    return _part(rank, num_ranks, device, lambda s, d: [1 << 20] if d == (s + 1) % num_ranks else [])


def one_tensor_to_all(rank: int, num_ranks: int, device) -> Part:
    if rank == 0:
        tensor = torch.arange(50, device=device)
        return [Message(peer, tensor) for peer in range(1, num_ranks)], [], []
    return [], [Message(0, torch.zeros(50, dtype=torch.int64, device=device))], [torch.arange(50, device=device)]


def into_place(rank: int, num_ranks: int, device) -> Part:
    """Pieces of a larger tensor are sent from, and received into, their place."""
    sends, receives, wanted = _part(rank, num_ranks, device, lambda s, d: [8])
    line = torch.zeros(8 * len(receives), device=device)
    places = [Message(m.peer, line[8 * i : 8 * i + 8]) for i, m in enumerate(receives)]
    source = torch.cat([m.tensor for m in sends]) if sends else line
    return [Message(m.peer, source[8 * i : 8 * i + 8]) for i, m in enumerate(sends)], places, wanted


CASES = [
    ring,
    unequal_all_to_all,
    several_messages_in_order,
    mixed_dtypes,
    most_ranks_idle,
    nobody_has_anything,
    large,
    one_tensor_to_all,
    into_place,
]


def check(case: Callable, part: Part) -> None:
    for message, wanted in zip(part[1], part[2], strict=True):
        assert torch.equal(message.tensor, wanted), f"{case.__name__}: wrong message from rank {message.peer}"
