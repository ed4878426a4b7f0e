"""When moves of parameters and gradients happen: at once, or in the background while this rank computes."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Protocol

import torch

from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.side_stream import SideStream, mark_current

Interval = tuple[int, int]  # start and end in ns of time.perf_counter_ns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """What moves while another strategy computes; each costs a second slab of its kind where the pool needs one."""

    flush: bool = False  # the gradients of the strategy before travel home
    prefetch: bool = False  # the parameters of the next strategy arrive

    @property
    def any(self) -> bool:
        return self.flush or self.prefetch


OVERLAPS = {
    "none": Overlap(),
    "flush": Overlap(flush=True),
    "both": Overlap(flush=True, prefetch=True),
}


class Gate:
    """Holds back additions to home's gradients while home's own backward pass adds to them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_open = threading.Event()
        self._is_open.set()
        self._opened_after: torch.cuda.Event | None = None

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        """Lets additions through, after what the current stream holds."""
        if not self._is_open.is_set():
            self._opened_after = mark_current(self._device)
            self._is_open.set()

    def wait(self, stream: SideStream) -> None:
        """Returns when the gate is open; further work on ``stream`` comes after what it was held back for."""
        self._is_open.wait()
        stream.follow(self._opened_after)


class Move(Protocol):
    """A run of an executor that was given to a mover."""

    busy: list[Interval]  # when it ran beside other work; complete after ``wait``

    def wait(self) -> None:
        """Returns when it is done; raises what it raised."""


class Mover(Protocol):
    """Runs executors, in the order in which they are submitted: the same on all ranks."""

    def submit(self, executor: ReshardExecutor, gate: Gate | None = None) -> Move:
        """Runs ``executor``, whose additions to its destination wait for ``gate``."""


class InlineMover:
    """Runs each move at once, before ``submit`` returns."""

    def submit(self, executor: ReshardExecutor, gate: Gate | None = None) -> Move:
        executor.run()
        return _DONE


class _Done:
    @property
    def busy(self) -> list[Interval]:
        return []

    def wait(self) -> None:
        pass


_DONE = _Done()


class BackgroundMover:
    """Runs moves one after the other in the background.

    Their transports need a process group that nothing else uses: messages of two threads must not mix.
    """

    def __init__(self) -> None:
        self._last: BackgroundMove | None = None

    def submit(self, executor: ReshardExecutor, gate: Gate | None = None) -> Move:
        self._last = BackgroundMove(executor, gate, self._last)
        return self._last


class BackgroundMove:
    """One move in a thread of its own, which begins when the move before has ended."""

    def __init__(self, executor: ReshardExecutor, gate: Gate | None, previous: BackgroundMove | None) -> None:
        self.busy: list[Interval] = []
        self._error: BaseException | None = None
        self._gate = gate
        self._handle = executor.begin(None if gate is None else self._pass_gate)
        self._thread = threading.Thread(target=self._run, args=(previous,), name="hotspa-move", daemon=True)
        self._thread.start()

    def _run(self, previous: BackgroundMove | None) -> None:
        try:
            if previous is not None:
                previous._thread.join()
                if previous._error is not None:
                    raise RuntimeError("the move before this one failed") from previous._error
            self._began_ns = time.perf_counter_ns()
            self._handle.finish()
            self.busy.append((self._began_ns, time.perf_counter_ns()))
        except BaseException as error:  # noqa: BLE001 (handed to the thread that waits)
            self._error = error

    def _pass_gate(self, stream: SideStream) -> None:
        stream.synchronize()
        self.busy.append((self._began_ns, time.perf_counter_ns()))
        self._gate.wait(stream)
        self._began_ns = time.perf_counter_ns()

    def wait(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._handle.wait()
