"""Brings parameters to a strategy and its gradients home, through slabs that all other strategies share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding import ReshardPlan, build_flush_plan, build_switch_plan, plan_costs
from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.plan_cache import PlanCache
from hotspa_plugin.resharding.staging_buffer import StagingBuffer
from hotspa_plugin.resharding.transports import Transport
from hotspa_plugin.runtime.agreement import check_agreement
from hotspa_plugin.runtime.mover import BackgroundMover, Gate, InlineMover, Interval, Move, Mover, Overlap
from hotspa_plugin.runtime.slab import Slab
from hotspa_plugin.runtime.whereabouts import gather_nodes
from hotspa_plugin.topology import cards_of_nodes


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
    parameter_slab: Slab
    gradient_slab: Slab
    parameter_bytes: int
    gradient_bytes: int


class HotSwitcher:
    """Owns the slabs, and for every strategy but home the plans and executors that fill and empty them.

    For each bucket: ``finish_flush`` of what ``flush_in_the_way`` names, ``enter``, perhaps ``prefetch`` of the next,
    compute, ``start_flush``. Then ``make_room_for_home``, home's bucket, ``finish_flush`` of all that ``flushing``
    names, ``release``. Without overlap, what is started is done when the call returns.
    """

    def __init__(
        self,
        *,
        rank: int,
        home: HomeTensors,
        others: Mapping[str, StrategyTensors],
        transport: Transport,
        node_of_rank: np.ndarray | None = None,
        cards_per_node: int = 1,
        policy: str = "balanced",
        memory_budget_bytes: int | None = None,
        overlap: Overlap = Overlap(),
        order: str = "auto",
        plan_cache: PlanCache | None = None,
        device: torch.device,
    ) -> None:
        """``node_of_rank`` is found out where it is not given; each node's ranks share its network cards evenly.

        ``order`` of the others' buckets is ``ascending`` as ``others`` are, ``descending``, or ``auto``: where
        parameters arrive ahead, the strategy that the least must be brought to comes first, since nothing hides its
        switch; else ascending. With ``overlap``, ``transport`` needs a process group that nothing else uses.
        """
        node_of_rank = gather_nodes() if node_of_rank is None else node_of_rank
        card_of_rank = cards_of_nodes(node_of_rank, cards_per_node)
        self.poison = False  # fill the slabs with NaN before each switch, for tests
        self.overlap = overlap
        self._mover: Mover = BackgroundMover() if overlap.any else InlineMover()
        self._device = device
        # Neighbours in the order use different slabs, so that one may be emptied or filled while the other computes.
        is_second_useful = len(others) > 1
        self._parameter_slabs = [Slab(device) for _ in range(1 + (overlap.prefetch and is_second_useful))]
        self._gradient_slabs = [Slab(device) for _ in range(1 + (overlap.flush and is_second_useful))]
        self._plans: dict[str, tuple[ReshardPlan, ReshardPlan]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._occupant: str | None = None
        self._arriving: tuple[str, Move] | None = None
        self._flushing: dict[str, tuple[Move, Gate]] = {}
        for label, other in others.items():
            plan = build_switch_plan if plan_cache is None else plan_cache.switch_plan
            switch_plan = plan(
                home.layout, other.layout, policy=policy, node_of_rank=node_of_rank, card_of_rank=card_of_rank
            )
            flush_plan = build_flush_plan(other.layout, home.layout, switch_plan)
            for what, one in (("switch to", switch_plan), ("flush from", flush_plan)):
                check_agreement(f"the {what} {label}", one.digest(), device=device)
            self._plans[label] = (switch_plan, flush_plan)
        self.running_order = self._choose_order(order)
        staging = StagingBuffer()  # kept from step to step; moves take turns, so one serves all
        for index, label in enumerate(self.running_order):
            other, (switch_plan, flush_plan) = others[label], self._plans[label]
            parameter_slab = self._parameter_slabs[index % len(self._parameter_slabs)]
            gradient_slab = self._gradient_slabs[index % len(self._gradient_slabs)]
            parameters, parameter_bytes = parameter_slab.reserve(other.parameters)
            trainable = {name: p for name, p in other.parameters.items() if p.requires_grad}
            gradients, gradient_bytes = gradient_slab.reserve(trainable, dtype=torch.float32)
            for name, parameter in other.parameters.items():
                parameter.data = parameters[name]
            for name, parameter in trainable.items():
                other.attach_gradient(parameter, gradients[name])
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
                parameter_slab=parameter_slab,
                gradient_slab=gradient_slab,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient_bytes,
            )

    def _choose_order(self, order: str) -> tuple[str, ...]:
        ascending = tuple(self._plans)
        if order == "descending":
            return ascending[::-1]
        if order == "auto" and self.overlap.prefetch:
            costs = {label: plan_costs(switch) for label, (switch, _) in self._plans.items()}
            return tuple(sorted(ascending, key=lambda o: (costs[o].max_card_bytes, costs[o].max_receive_bytes)))
        return ascending

    @property
    def slab_bytes(self) -> int:
        """Bytes that all slabs hold now."""
        return sum(slab.num_bytes for slab in (*self._parameter_slabs, *self._gradient_slabs))

    def required_slab_bytes(self, label: str) -> int:
        """Bytes that all slabs hold at most on this rank while ``label`` runs (home's included)."""
        own, others = self._tenants.get(label), self._tenants.values()
        if own is None:
            return max((t.gradient_bytes for t in others), default=0) if self.overlap.flush else 0
        total = own.parameter_bytes + own.gradient_bytes
        total += max((t.parameter_bytes for t in others if t.parameter_slab is not own.parameter_slab), default=0)
        total += max((t.gradient_bytes for t in others if t.gradient_slab is not own.gradient_slab), default=0)
        return total

    def layout(self, label: str) -> ShardLayout:
        """The shard layout of ``label``."""
        return self._plans[label][0].destination

    def plans(self, label: str) -> tuple[ReshardPlan, ReshardPlan]:
        """The (switch, flush) plans between home and ``label``."""
        return self._plans[label]

    def switch_bytes(self, label: str) -> BytesMoved:
        """What a switch to ``label`` moves."""
        return self._tenants[label].switch_bytes

    def flush_bytes(self, label: str) -> BytesMoved:
        """What a flush from ``label`` moves."""
        return self._tenants[label].flush_bytes

    # ---- parameters

    def prefetch(self, label: str) -> None:
        """Starts to bring home's parameters to ``label``, where they need not wait for the slab in use."""
        slab = self._tenants[label].parameter_slab
        if self.overlap.prefetch and slab is not self._tenants[self._occupant].parameter_slab:
            self._arriving = (label, self._start_switch(label))

    def enter(self, label: str) -> list[Interval]:
        """Brings home's parameters to ``label`` and zeroes its gradients. Collective over all ranks.

        Returns when parameters moved beside other work.
        """
        tenant = self._tenants[label]
        assert self.flush_in_the_way(label) is None, f"gradients are still on their way home from {label}'s slab"
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving[0] != label:
            arriving[1].wait()
            arriving = None
        move = self._start_switch(label) if arriving is None else arriving[1]
        tenant.gradient_slab.size_for(tenant.gradient_bytes)
        tenant.gradient_slab.fill(0)
        self._occupant = label
        move.wait()
        return move.busy

    def _start_switch(self, label: str) -> Move:
        tenant = self._tenants[label]
        tenant.parameter_slab.size_for(tenant.parameter_bytes)
        if self.poison:
            tenant.parameter_slab.fill(0xFF)
        return self._mover.submit(tenant.switch)

    # ---- gradients

    @property
    def flushing(self) -> list[str]:
        """The strategies whose gradients are on their way home, oldest first."""
        return list(self._flushing)

    def flush_in_the_way(self, label: str) -> str | None:
        """The strategy whose gradients still use the slab that ``label`` needs."""
        slab = self._tenants[label].gradient_slab
        return next((other for other in self._flushing if self._tenants[other].gradient_slab is slab), None)

    def start_flush(self, label: str, *, beside_home: bool = False) -> None:
        """Begins to add ``label``'s accumulated gradients to home's. Collective over all ranks.

        Where home's bucket comes next and this flush may go on ``beside_home``, nothing is added before it is finished,
        however early it arrives: home's backward adds to the same gradients, and sums must not depend on who is first.
        """
        assert self._occupant == label, f"the slab holds {self._occupant}, not {label}"
        gate = Gate(self._device)
        if beside_home and self.overlap.flush:
            gate.close()
        move = self._mover.submit(self._tenants[label].flush, gate)
        if self.overlap.flush:
            self._flushing[label] = move, gate
        else:
            move.wait()

    def finish_flush(self, label: str) -> list[Interval]:
        """Returns when ``label``'s gradients are home, with the times in which they moved beside other work."""
        move, gate = self._flushing.pop(label)
        gate.open()
        move.wait()
        return move.busy

    def make_room_for_home(self) -> None:
        """Gives home's bucket the slabs' memory, but for gradients on their way, and home's gradients for its own use.

        Only one flush may be under way, and only one that was started to go on beside home.
        """
        assert len(self._flushing) < 2, "home's bucket has room for one flush beside it"
        assert not any(gate.is_open for _, gate in self._flushing.values()), "a flush may add while home's bucket does"
        in_use = [self._tenants[label].gradient_slab for label in self._flushing]
        for slab in (*self._parameter_slabs, *self._gradient_slabs):
            if all(slab is not other for other in in_use):
                slab.release()

    def flush(self, label: str) -> None:
        """Adds ``label``'s accumulated gradients to home's, and returns when they are there."""
        self.start_flush(label)
        if label in self._flushing:
            self.finish_flush(label)

    def release(self) -> None:
        """Empties all slabs."""
        assert not self._flushing, f"gradients are still on their way home from {self.flushing}"
        if self._arriving is not None:
            self._arriving[1].wait()
            self._arriving = None
        for slab in (*self._parameter_slabs, *self._gradient_slabs):
            slab.release()
        self._occupant = None


def _over_all_ranks(executor: ReshardExecutor, device: torch.device) -> BytesMoved:
    total = torch.tensor([executor.moved.local_bytes, executor.moved.sent_bytes], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    local, remote = total.tolist()
    return BytesMoved(local=local, remote=remote)
