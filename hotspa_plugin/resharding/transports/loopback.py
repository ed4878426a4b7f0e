"""All ranks of a plan in one process."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hotspa_plugin.resharding.transports.protocol import Message


class LoopbackWorld:
    """Mailboxes between ``num_ranks`` ranks of one process, for tests and for planning without a cluster.

    The ranks take turns: all start an exchange before one waits for it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._mail: dict[tuple[int, int], collections.deque[torch.Tensor]] = collections.defaultdict(collections.deque)

    def transport(self, rank: int) -> LoopbackTransport:
        """The end of one rank."""
        return LoopbackTransport(self, rank)

    def run(self, executors: Sequence[Any]) -> list[Any]:
        """Runs one executor per rank in lockstep; returns what each one's ``run`` would."""
        handles = [executor.start() for executor in executors]
        while any([handle.advance() for handle in handles]):  # a list: every rank advances
            pass
        self.assert_empty()
        return [handle.wait() for handle in handles]

    def post(self, source: int, destination: int, tensor: torch.Tensor) -> None:
        """Puts a copy of ``tensor`` into the mailbox from ``source`` to ``destination``."""
        self._mail[source, destination].append(tensor.clone())

    def take(self, source: int, destination: int) -> torch.Tensor:
        """The oldest message from ``source`` to ``destination``."""
        box = self._mail[source, destination]
        if not box:
            raise RuntimeError(f"rank {destination} waits for a message that rank {source} has not sent")
        return box.popleft()

    def assert_empty(self) -> None:
        """Raises AssertionError where a message was sent that nobody received."""
        left = {pair: len(box) for pair, box in self._mail.items() if box}
        assert not left, f"messages that nobody received: {left}"


class LoopbackTransport:
    """One rank's end of a LoopbackWorld."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self._world = world
        self._rank = rank

    def exchange(self, sends: Iterable[Message], receives: Sequence[Message]) -> _LoopbackWork:
        for peer, tensor in sends:
            self._world.post(self._rank, peer, tensor)
        return _LoopbackWork(self._world, self._rank, list(receives))


class _LoopbackWork:
    def __init__(self, world: LoopbackWorld, rank: int, receives: list[Message]) -> None:
        self._world, self._rank, self._receives = world, rank, receives
        self._num_filled = 0

    def wait_receive(self, index: int) -> None:
        while self._num_filled <= index:
            self._fill(self._receives[self._num_filled])
            self._num_filled += 1

    def wait(self) -> None:
        self.wait_receive(len(self._receives) - 1)

    def _fill(self, message: Message) -> None:
        peer, tensor = message
        sent = self._world.take(peer, self._rank)
        if sent.dtype != tensor.dtype or sent.numel() != tensor.numel():
            raise RuntimeError(
                f"rank {self._rank} expects {tensor.numel()} elements of {tensor.dtype} from rank {peer}, "
                f"which sent {sent.numel()} of {sent.dtype}"
            )
        tensor.copy_(sent.view_as(tensor))
