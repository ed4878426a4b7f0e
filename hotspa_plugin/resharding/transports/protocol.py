"""What an executor asks of a transport."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch


class Message(NamedTuple):
    """One contiguous tensor to or from rank ``peer`` (numbered as in the plan)."""

    peer: int
    tensor: torch.Tensor


class Work(Protocol):
    """An exchange under way."""

    def wait_receive(self, index: int) -> None:
        """Returns when the ``index``-th tensor to receive is filled."""

    def wait(self) -> None:
        """Returns when all sent tensors may be reused and all received ones are filled."""


class Transport(Protocol):
    """Exchanges messages between the ranks of one plan.

    Messages between a pair of ranks arrive in the order in which they were sent; sender and receiver name
    equally many of equal dtype and element count. Every rank calls ``exchange`` equally often, with no
    messages where it has none.
    """

    def exchange(self, sends: Iterable[Message], receives: Sequence[Message]) -> Work:
        """Starts sending and receiving; tensors belong to the exchange until ``wait`` returns.

        ``sends`` may fill each tensor only as it is asked for it: a transport that can sends the first while the
        next is being packed.
        """
