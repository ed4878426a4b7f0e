"""Messages over a torch.distributed process group, gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from hotspa_plugin.resharding.transports.protocol import Message


class TorchDistributedTransport:
    """Batched sends and receives in ``group`` (default: all ranks), whose rank i is rank i of the plan.

    Point-to-point messages go straight from and to their place, where an all-to-all would need all of a
    rank's messages in one buffer. The group must be warmed up before use where the backend connects lazily
    (NCCL): ranks without messages call nothing here.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group if group is not None else dist.group.WORLD
        self._global_rank = dist.get_process_group_ranks(self._group)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> _DistributedWork:
        operations = [
            dist.P2POp(dist.irecv, tensor, self._global_rank[peer], group=self._group) for peer, tensor in receives
        ]
        operations += [
            dist.P2POp(dist.isend, tensor, self._global_rank[peer], group=self._group) for peer, tensor in sends
        ]
        return _DistributedWork(dist.batch_isend_irecv(operations) if operations else [])


class _DistributedWork:
    def __init__(self, requests: list[dist.Work]) -> None:
        self._requests = requests

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        self._requests = []
