"""Running a reshard plan on one rank: pack, exchange, unpack or add."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch

from hotspa_plugin.resharding.executor_steps import (
    Arrivals,
    Resolver,
    Steps,
    aligned,
    copy_all,
    link_hops,
    packed_in_turn,
)
from hotspa_plugin.resharding.plan import DESTINATION, SOURCE, ReshardPlan
from hotspa_plugin.resharding.round_cuts import item_sizes
from hotspa_plugin.resharding.rounds import rounds_of_rank, staging_layout
from hotspa_plugin.resharding.side_stream import SideStream
from hotspa_plugin.resharding.staging_buffer import StagingBuffer
from hotspa_plugin.resharding.transports.protocol import Transport


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardStats:
    """What one run moved on this rank."""

    local_bytes: int  # copied or added within the rank
    sent_bytes: int
    received_bytes: int
    num_rounds: int
    predicted_peak_extra_bytes: int  # largest staging of a round, from the plan
    peak_extra_bytes: int  # staging memory held


class ReshardHandle:
    """A run under way. ``wait`` finishes it; ``advance`` takes it one step further.

    On CUDA all work is on a stream of its own, which comes after what the current stream held when the handle was
    made; ``wait`` makes the current stream wait for it.
    """

    def __init__(self, steps: Iterator[None], stats: Callable[[], ReshardStats], stream: SideStream) -> None:
        self._steps = steps
        self._stats = stats
        self._stream = stream
        self._done = False
        stream.follow_current()

    def advance(self) -> bool:
        """Finishes the exchange that is under way and starts the next one; False when all is done."""
        if not self._done:
            with self._stream.current():
                self._done = next(self._steps, True) is True
        return not self._done

    def finish(self) -> None:
        """Takes all further steps, in whichever thread; returns when the device has done them too."""
        while self.advance():
            pass
        self._stream.synchronize()

    def wait(self) -> ReshardStats:
        """Returns when everything has been received and written (on CUDA: is in the current stream's past)."""
        while self.advance():
            pass
        self._stream.join_current()
        return self._stats()


class ReshardExecutor:
    """Runs one plan on one rank, as often as wanted.

    ``source`` and ``destination`` map the names of local parameters in the plan's two layouts to tensors (a
    parameter, or a gradient of the same shape). The tensors are resolved to views at the first run and held:
    their storages may be resized to 0 and back between runs. Elements move in the tensors' own dtype.
    Runs of contiguous elements are sent from and received into their place; the rest goes through ``staging``,
    at most ``memory_budget_bytes`` of it, for which the plan is cut into rounds. Additions into one element
    happen in order of their source rank, local ones included.

    With ``wire_dtype`` (the same on every rank) elements travel between ranks in that dtype and are converted at
    both ends, such as bf16 for fp32 gradients: sums stay in the tensors' own dtype.

    Raises ValueError for a missing tensor, for one that is too small or of another dtype than its counterpart,
    and for a budget that is too small.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        transport: Transport,
        source: Mapping[str, torch.Tensor],
        destination: Mapping[str, torch.Tensor],
        memory_budget_bytes: int | None = None,
        *,
        staging: StagingBuffer | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._transport = transport
        self._sides = (dict(source), dict(destination))
        self._staging = staging or StagingBuffer()
        self._wire_dtype = wire_dtype
        self._dtypes = self._check_tensors(memory_budget_bytes)
        tensors = [*source.values(), *destination.values()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._stream = SideStream(self._device)
        self._stage_locals = self._overlaps()
        self._rounds = rounds_of_rank(
            plan,
            rank,
            memory_budget_bytes=memory_budget_bytes,
            converted=wire_dtype is not None,
            stage_all=self._stage_locals or wire_dtype is not None,
        )
        if self._stage_locals and len(self._rounds) > plan.num_hops:
            raise ValueError(
                "source and destination share storage: such a switch must fit in one round, give it more memory"
            )
        sizes = np.zeros(len(plan.source.tensors), dtype=np.int64)
        for tensor, dtype in self._dtypes.items():
            sizes[tensor] = dtype.itemsize
        self._item_sizes = sizes
        self._wire_sizes = sizes if wire_dtype is None else np.full_like(sizes, wire_dtype.itemsize)
        self._needed = [
            staging_layout(r, self._wire_sizes, local_item_size=sizes if self._stage_locals else None)
            for r in self._rounds
        ]
        sizes_needed = [aligned(needed.num_bytes) for needed in self._needed]
        # Where both hops fit into the staging buffer at once, the second need not wait for all of the first.
        self._overlaps_hops = (
            transport.eager
            and len(self._rounds) == plan.num_hops == 2
            and not self._stage_locals
            and (memory_budget_bytes is None or sum(sizes_needed) <= memory_budget_bytes)
        )
        # Only a second hop beside the first needs an aligned place; a lone round keeps to the budget to the byte.
        alone = max((needed.num_bytes for needed in self._needed), default=0)
        self._predicted = sum(sizes_needed) if self._overlaps_hops else alone

    # ---- checks

    def _check_tensors(self, memory_budget_bytes: int | None) -> dict[int, torch.dtype]:
        """The dtype in which each global tensor moves, from this rank's own tensors."""
        plan, dtypes = self._plan, {}
        index = {spec.name: i for i, spec in enumerate(plan.source.tensors)}
        for layout, tensors, what in zip(
            (plan.source, plan.destination), self._sides, ("source", "destination"), strict=True
        ):
            for shard in layout.shards(self._rank):
                spec = layout.tensors[shard.tensor]
                if plan.accumulate and not spec.trainable:
                    continue
                if shard.parameter not in tensors:
                    raise ValueError(
                        f"{what} tensor {shard.parameter} (of {spec.name}) is missing on rank {self._rank}"
                    )
                tensor = tensors[shard.parameter]
                reach = 1 + shard.storage_offset
                reach += sum((n - 1) * s for n, s in zip(shard.region.shape, shard.strides, strict=True))
                if not tensor.is_contiguous() or tensor.numel() < reach:
                    raise ValueError(
                        f"{what} tensor {shard.parameter} must be contiguous with at least {reach} elements, "
                        f"it has {tensor.numel()}"
                    )
                dtype = dtypes.setdefault(index[spec.name], tensor.dtype)
                if dtype != tensor.dtype:
                    raise ValueError(
                        f"tensor {spec.name} is {dtype} in one place and {tensor.dtype} as {what} "
                        f"{shard.parameter}: both ends of a reshard need one dtype"
                    )
        if memory_budget_bytes is not None:
            sizes = item_sizes(plan)
            assumed = dict(zip(plan.cells.tensor.tolist(), sizes[plan.cells.group].tolist(), strict=True))
            for tensor, own_dtype in dtypes.items():
                dtype = self._wire_dtype or own_dtype
                if dtype.itemsize > assumed.get(tensor, dtype.itemsize):
                    raise ValueError(
                        f"tensor {plan.source.tensors[tensor].name} moves as {dtype}, wider than the memory budget "
                        f"reckons with ({assumed[tensor]} bytes an element): use a narrower dtype or no budget"
                    )
        return dtypes

    def _overlaps(self) -> bool:
        storages = [{t.untyped_storage()._cdata for t in tensors.values()} for tensors in self._sides]
        return bool(storages[SOURCE] & storages[DESTINATION])

    @property
    def predicted_peak_extra_bytes(self) -> int:
        """Staging memory that this rank needs, known before the first run."""
        return self._predicted

    # ---- views

    @functools.cached_property
    def _steps(self) -> list[Steps]:
        buffer = self._staging.reserve(self._predicted, self._device)
        resolver = Resolver(
            plan=self._plan,
            rank=self._rank,
            sides=self._sides,
            dtypes=self._dtypes,
            wire_dtype=self._wire_dtype,
            stage_locals=self._stage_locals,
            buffer=buffer,
        )
        if not self._overlaps_hops:
            return [resolver.resolve(r, n) for r, n in zip(self._rounds, self._needed, strict=True)]
        first, second = self._rounds
        one = resolver.resolve(first, self._needed[0])
        two = resolver.resolve(second, self._needed[1], base=aligned(self._needed[0].num_bytes))
        return [one, link_hops(first, one, second, two)]

    # ---- running

    def begin(self, before_writing: Callable[[SideStream], None] | None = None) -> ReshardHandle:
        """A run that has not done anything yet; ``advance``, ``finish`` or ``wait`` of the handle, in any thread, does.

        ``before_writing`` is called, with the stream that the work is on, when all that a flush receives has arrived
        and before it adds to ``destination``: it may hold the additions back while others use the tensors.
        """
        assert before_writing is None or self._plan.accumulate

        def stats() -> ReshardStats:
            return dataclasses.replace(self.moved, peak_extra_bytes=self._staging.held_bytes)

        return ReshardHandle(self._run_steps(before_writing), stats, self._stream)

    def start(self) -> ReshardHandle:
        """Starts a run and returns while its first exchange is under way."""
        handle = self.begin()
        handle.advance()
        return handle

    def run(self) -> ReshardStats:
        """Runs the plan once."""
        return self.begin().wait()

    def _run_steps(self, before_writing: Callable[[SideStream], None] | None) -> Iterator[None]:
        # Not before the run's own turn: another one may use the same buffer until then.
        self._staging.reserve(self._predicted, self._device)
        before: Arrivals | None = None  # of the hop before, where it is still under way
        for steps in self._steps:
            with torch.no_grad():
                copy_all(steps.set_aside)
                if before is not None and steps.early_writes:
                    before.write_all()
                work = self._transport.exchange(packed_in_turn(steps.sends, before), steps.receives)
                copy_all(steps.early_writes)
                if before is not None:
                    before.write_all()
            hold = None
            if before_writing is not None and steps.writes_destination:
                hold = functools.partial(before_writing, self._stream)
            arrivals = Arrivals(work, steps.arrivals, accumulate=self._plan.accumulate, before_writing=hold)
            yield None
            if self._overlaps_hops and before is None:
                before = arrivals
                continue
            with torch.no_grad():
                arrivals.write_all()

    @functools.cached_property
    def moved(self) -> ReshardStats:
        """What every run moves on this rank, known before the first one."""
        local = sent = received = 0
        for round_ in self._rounds:
            moves = round_.moves
            num_bytes = moves.num_elements * self._item_sizes[moves.tensor]
            wire_bytes = moves.num_elements * self._wire_sizes[moves.tensor]
            is_sent, is_received = moves.source_rank == self._rank, moves.destination_rank == self._rank
            local += int(num_bytes[is_sent & is_received].sum())
            sent += int(wire_bytes[is_sent & ~is_received].sum())
            received += int(wire_bytes[is_received & ~is_sent].sum())
        return ReshardStats(
            local_bytes=local,
            sent_bytes=sent,
            received_bytes=received,
            num_rounds=len(self._rounds),
            predicted_peak_extra_bytes=self._predicted,
            peak_extra_bytes=0,
        )
