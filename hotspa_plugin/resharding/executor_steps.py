"""One round of a plan resolved to tensors, and the order in which its parts happen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from hotspa_plugin.resharding.plan import DESTINATION, ReshardPlan
from hotspa_plugin.resharding.rounds import Places, Round, StagingLayout, carried
from hotspa_plugin.resharding.transports.protocol import Message, Work

Copy = tuple[torch.Tensor, torch.Tensor]  # (to, from)
LOCAL = -1


class Send(NamedTuple):
    """A message with what packs it, and the arrivals of the hop before that it passes on."""

    message: Message
    pack: list[Copy]
    needs: tuple[int, ...] = ()


class Arrival(NamedTuple):
    """A receive (or LOCAL) and, where it does not lie in its place already, what writes it there.

    ``row`` is a row of the round's moves that it brings.
    """

    receive: int
    row: int
    copy: Copy | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """One round with its rows resolved to views of the rank's tensors."""

    set_aside: list[Copy]  # local rows that must be read before anything is written
    sends: list[Send]
    receives: list[Message]
    early_writes: list[Copy]  # local copies that need not wait for the exchange
    arrivals: list[Arrival]  # in the order in which they are written
    writes_destination: bool  # some arrival goes to the plan's destination, not to a rank that passes it on


class Arrivals:
    """The arrivals of one exchange under way; each is written once, additions only in their order.

    ``before_writing`` is called once, when everything has arrived and before anything is written.
    """

    def __init__(
        self,
        work: Work,
        arrivals: list[Arrival],
        *,
        accumulate: bool,
        before_writing: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._arrivals = arrivals
        self._accumulate = accumulate
        self._before_writing = before_writing
        self._is_written = [False] * len(arrivals)
        self._num_written = 0  # all before this one are

    def write(self, index: int) -> None:
        """Waits for one arrival and writes it, after all before it where they add up."""
        if self._accumulate:
            for earlier in range(self._num_written, index + 1):
                self._write(earlier)
            self._num_written = max(self._num_written, index + 1)
        else:
            self._write(index)

    def write_all(self) -> None:
        """Waits for the whole exchange and writes what has not been written."""
        for index in range(len(self._arrivals)):
            self._write(index)
        self._work.wait()

    def _write(self, index: int) -> None:
        if self._is_written[index]:
            return
        if self._before_writing is not None:
            self._work.wait()
            self._before_writing()
            self._before_writing = None
        self._is_written[index] = True
        arrival = self._arrivals[index]
        if arrival.receive != LOCAL:
            self._work.wait_receive(arrival.receive)
        if arrival.copy is not None:
            target, origin = arrival.copy
            if self._accumulate:
                target.add_(origin)
            else:
                target.copy_(origin)


def copy_all(copies: list[Copy]) -> None:
    """Makes some copies, in order."""
    for target, origin in copies:
        target.copy_(origin)


def packed_in_turn(sends: list[Send], before: Arrivals | None = None) -> Iterator[Message]:
    """Packs each message only when the transport asks for it, so that earlier ones are on their way meanwhile.

    With ``before``, a message that passes on what the hop before brings waits for just that.
    """
    for send in sends:
        if before is not None:
            for index in send.needs:
                before.write(index)
        copy_all(send.pack)
        yield send.message


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up so that elements of any dtype may follow."""
    return -(-num_bytes // 16) * 16


def link_hops(first: Round, one: Steps, second: Round, two: Steps) -> Steps:
    """``two`` with every send told which arrivals of ``one`` it passes on."""
    of_shard: dict[tuple[int, int], list[int]] = {}
    for index, arrival in enumerate(one.arrivals):
        key = int(first.destination.side[arrival.row]), int(first.destination.shard[arrival.row])
        of_shard.setdefault(key, []).append(index)

    def needs(rows: tuple[int, ...]) -> tuple[int, ...]:
        found = set()
        for row in rows:
            key = int(second.source.side[row]), int(second.source.shard[row])
            for index in of_shard.get(key, ()):
                other = one.arrivals[index].row
                if (first.moves.low[other] < second.moves.high[row]).all() and (
                    second.moves.low[row] < first.moves.high[other]
                ).all():
                    found.add(index)
        return tuple(sorted(found))

    sends = [send._replace(needs=needs(m.rows)) for send, m in zip(two.sends, second.sends, strict=True)]
    return dataclasses.replace(two, sends=sends)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Resolver:
    """Turns a rank's rounds into views of its tensors."""

    plan: ReshardPlan
    rank: int
    sides: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
    dtypes: Mapping[int, torch.dtype]  # by the plan's source tensors
    wire_dtype: torch.dtype | None
    stage_locals: bool
    buffer: torch.Tensor  # a line of uint8

    def _view(self, round_: Round, places: Places, row: int, *, flat: bool) -> torch.Tensor:
        side = int(places.side[row])
        layout = (self.plan.source, self.plan.destination)[side]
        tensor = self.sides[side][layout.shards(self.rank)[places.shard[row]].parameter].detach()
        offset = tensor.storage_offset() + int(places.offset[row])
        if flat:
            return tensor.as_strided((int(round_.moves.num_elements[row]),), (1,), offset)
        shape = (round_.moves.high[row] - round_.moves.low[row]).tolist()
        return tensor.as_strided(shape, places.strides[row].tolist(), offset)

    def resolve(self, round_: Round, needed: StagingLayout, *, base: int = 0) -> Steps:
        """The steps of one round, whose staging begins ``base`` bytes into the buffer."""
        moves = round_.moves
        sends: list[Send] = []
        receives: list[Message] = []
        set_aside: list[Copy] = []
        early: list[Copy] = []
        late: list[tuple[int, Arrival]] = []  # with its source rank
        filled: dict[tuple, torch.Tensor] = {}

        def staged(offset: int, tensor: int, count: int, dtype: torch.dtype | None = self.wire_dtype) -> torch.Tensor:
            dtype = dtype or self.dtypes[tensor]
            return self.buffer.as_strided((count * dtype.itemsize,), (1,), base + offset).view(dtype)

        def parts(
            line: torch.Tensor, rows: Sequence[int], places: Places
        ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
            start = 0
            for row in rows:
                count = int(moves.num_elements[row])
                view = self._view(round_, places, row, flat=bool(places.contiguous[row]))
                yield row, view, line[start : start + count].view(view.shape)
                start += count

        for message in round_.sends:
            if not message.staged:
                view = self._view(round_, round_.source, message.rows[0], flat=True)
                sends.append(Send(Message(message.peer, view), []))
                continue
            pack: list[Copy] = []
            key = carried(round_, message)
            if key not in filled:
                line = staged(needed.sends[key], int(moves.tensor[message.rows[0]]), message.num_elements)
                filled[key] = line
                pack = [(part, view) for _, view, part in parts(line, message.rows, round_.source)]
            sends.append(Send(Message(message.peer, filled[key]), pack))
        for index, message in enumerate(round_.receives):
            if not message.staged:
                view = self._view(round_, round_.destination, message.rows[0], flat=True)
                receives.append(Message(message.peer, view))
                late.append((message.peer, Arrival(index, message.rows[0], None)))
                continue
            line = staged(needed.receives[index], int(moves.tensor[message.rows[0]]), message.num_elements)
            receives.append(Message(message.peer, line))
            found = parts(line, message.rows, round_.destination)
            late += [(message.peer, Arrival(index, row, (view, part))) for row, view, part in found]
        for row in round_.local_rows.tolist():
            flat = bool(round_.source.contiguous[row] and round_.destination.contiguous[row])
            target = self._view(round_, round_.destination, row, flat=flat)
            origin = self._view(round_, round_.source, row, flat=flat)
            if self.stage_locals:
                line = staged(needed.local_rows[row], int(moves.tensor[row]), int(moves.num_elements[row]), None)
                set_aside.append((line.view(origin.shape), origin))
                origin = line.view(origin.shape)
            if self.plan.accumulate or self.stage_locals:
                late.append((self.rank, Arrival(LOCAL, row, (target, origin))))
            else:
                early.append((target, origin))
        if self.plan.accumulate:  # sums depend on their order, which is that of source ranks
            late.sort(key=lambda item: (item[0], item[1].row))
        else:  # copies follow the order of arrival
            late.sort(key=lambda item: item[1].receive)
        return Steps(
            set_aside=set_aside,
            sends=sends,
            receives=receives,
            early_writes=early,
            arrivals=[arrival for _, arrival in late],
            writes_destination=any(round_.destination.side[arrival.row] == DESTINATION for _, arrival in late),
        )
