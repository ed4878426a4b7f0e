"""Brings parameters to a strategy and its gradients home, through one shared slab of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding import build_flush_plan, build_switch_plan
from hotspa_plugin.resharding.executor import ReshardExecutor, StagingBuffer
from hotspa_plugin.resharding.transports import Transport
from hotspa_plugin.runtime.slab import Slab


@dataclasses.dataclass(frozen=True, kw_only=True)
class HomeTensors:
    """Home's layout and this rank's tensors under it, by local parameter name.

    ``gradients`` holds the fp32 accumulators, shaped like their parameters, of the trainable ones.
    """

    layout: ShardLayout
    parameters: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyTensors:
    """Another strategy's layout and its parameters on this rank, to be moved into the slab.

    ``attach_gradient(parameter, accumulator)`` makes the backward pass add into ``accumulator``.
    """

    layout: ShardLayout
    parameters: Mapping[str, torch.nn.Parameter]
    attach_gradient: Callable[[torch.nn.Parameter, torch.Tensor], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BytesMoved:
    """What one switch or flush moves, summed over all ranks."""

    local: int  # within a rank
    remote: int  # from rank to rank


NOTHING_MOVED = BytesMoved(local=0, remote=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tenant:
    switch: ReshardExecutor
    flush: ReshardExecutor
    switch_bytes: BytesMoved
    flush_bytes: BytesMoved
    parameter_bytes: int
    gradient_bytes: int


class HotSwitcher:
    """Owns the two slabs, and for every strategy but home the plans and executors that fill and empty them."""

    def __init__(
        self,
        *,
        rank: int,
        home: HomeTensors,
        others: Mapping[str, StrategyTensors],
        transport: Transport,
        node_of_rank: np.ndarray | None = None,
        policy: str = "balanced",
        memory_budget_bytes: int | None = None,
        device: torch.device,
    ) -> None:
        self.poison = False  # fill the slabs with NaN before each switch, for tests
        self._parameter_slab = Slab(device)
        self._gradient_slab = Slab(device)
        self._plans = {}
        self._tenants: dict[str, _Tenant] = {}
        self._occupant: str | None = None
        staging = StagingBuffer()
        for label, other in others.items():
            switch_plan = build_switch_plan(home.layout, other.layout, policy=policy, node_of_rank=node_of_rank)
            flush_plan = build_flush_plan(other.layout, home.layout, switch_plan)
            self._plans[label] = (switch_plan, flush_plan)
            parameters, parameter_bytes = self._parameter_slab.reserve(other.parameters)
            trainable = {name: p for name, p in other.parameters.items() if p.requires_grad}
            gradients, gradient_bytes = self._gradient_slab.reserve(trainable, dtype=torch.float32)
            for name, parameter in other.parameters.items():
                parameter.data = parameters[name]
            for name, parameter in trainable.items():
                other.attach_gradient(parameter, gradients[name])
            # Buffers are kept from step to step; switch and flush take turns, so one set serves both.
            switch = ReshardExecutor(
                switch_plan, rank, transport, home.parameters, parameters, memory_budget_bytes, staging=staging
            )
            flush = ReshardExecutor(
                flush_plan, rank, transport, gradients, home.gradients, memory_budget_bytes, staging=staging
            )
            self._tenants[label] = _Tenant(
                switch=switch,
                flush=flush,
                switch_bytes=_over_all_ranks(switch, device),
                flush_bytes=_over_all_ranks(flush, device),
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient_bytes,
            )

    @property
    def slab_bytes(self) -> int:
        """Bytes that both slabs hold now."""
        return self._parameter_slab.num_bytes + self._gradient_slab.num_bytes

    def required_slab_bytes(self, label: str) -> int:
        """Bytes that both slabs hold on this rank while ``label`` runs."""
        tenant = self._tenants[label]
        return tenant.parameter_bytes + tenant.gradient_bytes

    def layout(self, label: str) -> ShardLayout:
        """The shard layout of ``label``."""
        return self._plans[label][0].destination

    def plans(self, label: str):
        """The (switch, flush) plans between home and ``label``."""
        return self._plans[label]

    def enter(self, label: str) -> BytesMoved:
        """Brings home's parameters to ``label`` and zeroes its gradients. Collective over all ranks."""
        tenant = self._tenants[label]
        self._parameter_slab.size_for(tenant.parameter_bytes)
        self._gradient_slab.size_for(tenant.gradient_bytes)
        if self.poison:
            self._parameter_slab.fill(0xFF)
        self._gradient_slab.fill(0)
        self._occupant = label
        tenant.switch.run()
        return tenant.switch_bytes

    def flush(self, label: str) -> BytesMoved:
        """Adds ``label``'s accumulated gradients to home's. Collective over all ranks."""
        assert self._occupant == label, f"the slab holds {self._occupant}, not {label}"
        self._tenants[label].flush.run()
        self._occupant = None
        return self._tenants[label].flush_bytes

    def release(self) -> None:
        """Empties both slabs, so that home's bucket has their memory."""
        self._parameter_slab.release()
        self._gradient_slab.release()
        self._occupant = None


def _over_all_ranks(executor: ReshardExecutor, device: torch.device) -> BytesMoved:
    total = torch.tensor([executor.moved.local_bytes, executor.moved.sent_bytes], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    local, remote = total.tolist()
    return BytesMoved(local=local, remote=remote)
