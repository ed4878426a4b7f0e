"""Messages over a torch.distributed process group, gloo or NCCL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from hotspa_plugin.resharding.transports.protocol import Message


class TorchDistributedTransport:
    """Sends and receives in ``group`` (default: all ranks), whose rank i is rank i of the plan.

    Point-to-point messages go straight from and to their place, where an all-to-all would need all of a
    rank's messages in one buffer. ``batched`` hands them over as one group call, which NCCL needs; it is off by
    default on gloo, where the first message leaves while the next is packed. The group must be warmed up
    before use where the backend connects lazily (NCCL): ranks without messages call nothing here.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, batched: bool | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self._global_rank = dist.get_process_group_ranks(self._group)
        self._batched = dist.get_backend(self._group) != "gloo" if batched is None else batched

    def exchange(self, sends: Iterable[Message], receives: Sequence[Message]) -> _DistributedWork:
        if self._batched:
            return self._exchange_batched(sends, receives)
        requests = [dist.irecv(tensor, self._global_rank[peer], group=self._group) for peer, tensor in receives]
        requests += [dist.isend(tensor, self._global_rank[peer], group=self._group) for peer, tensor in sends]
        return _DistributedWork(requests, len(receives))

    def _exchange_batched(self, sends: Iterable[Message], receives: Sequence[Message]) -> _DistributedWork:
        calls = [(dist.irecv, message) for message in receives] + [(dist.isend, message) for message in sends]
        operations = [
            dist.P2POp(call, tensor, self._global_rank[peer], group=self._group) for call, (peer, tensor) in calls
        ]
        return _DistributedWork(dist.batch_isend_irecv(operations) if operations else [], len(receives))


class _DistributedWork:
    """Requests of the receives, then of the sends; or one request for all, where the backend merges them."""

    def __init__(self, requests: list[dist.Work], num_receives: int) -> None:
        self._requests: list[dist.Work | None] = list(requests)
        self._one_each = len(requests) >= num_receives

    def wait_receive(self, index: int) -> None:
        if self._one_each:
            self._wait(index)
        else:
            self.wait()

    def wait(self) -> None:
        for index in range(len(self._requests)):
            self._wait(index)

    def _wait(self, index: int) -> None:
        request = self._requests[index]
        if request is not None:
            request.wait()
            self._requests[index] = None
