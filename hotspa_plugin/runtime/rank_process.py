"""One rank in a process of its own: how it starts, serves calls, and never outlives its parent."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import importlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hotspa_plugin.runtime.activity import read_activity, set_activity, share_activity
from hotspa_plugin.runtime.node_network import RankNetwork
from hotspa_plugin.runtime.rank_failure import RankReport, condensed_stack, report_death, report_error

START_TIMEOUT_S = 600.0  # a torch process takes seconds to start, many of them on a busy machine minutes
END_GRACE_S = 2.0  # between SIGTERM and SIGKILL
STACK_DUMP_WAIT_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What a rank process needs to know at its start. ``backend`` is gloo or nccl."""

    label: str
    rank: int
    num_ranks: int
    backend: str
    collective_timeout_s: float
    stack_path: str
    activity_path: str
    network: RankNetwork | None = None  # None: this machine's own


def resolve_target(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``"package.module:function"`` names; a callable stands for itself."""
    if callable(target):
        return target
    module_name, separator, name = target.partition(":")
    if not separator or not name:
        raise ValueError(f"function {target!r}: write it as package.module:function")
    function = importlib.import_module(module_name)
    for part in name.split("."):
        function = getattr(function, part)
    return function


# ---------------------------------------------------------------- the child's side


def serve(connection: Connection, spec: RankSpec) -> None:
    """Main function of a rank process: joins the process group, then answers calls until told to stop.

    Messages from the parent: ``("meet", port)`` once all have imported torch, ``("call", target, args, kwargs)``,
    ``("stop",)``. Answers: ``("imported", port)`` with rank 0's port (None elsewhere), ``("ready",)``,
    ``("done", result)`` and ``("failed", RankReport)``.
    """
    # Ctrl-C is the parent's to handle: it ends the ranks, which therefore print nothing of their own.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)  # a group of its own, so that a rank is ended together with the processes it started
    threading.Thread(target=_end_with_parent, name="parent-watcher", daemon=True).start()
    share_activity(spec.activity_path)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # whole lines: ranks share the output
    stacks = open(spec.stack_path, "w")  # noqa: SIM115 - faulthandler needs it until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    try:
        if spec.network is not None:
            spec.network.enter()
        _join_process_group(connection, spec)
        _send(connection, ("ready",))
    except BaseException as error:
        _send(connection, ("failed", report_error(spec.label, error)))
        return
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        except Exception as error:  # arguments that cannot be unpickled here
            _send(connection, ("failed", report_error(spec.label, error)))
            continue
        if message[0] == "stop":
            break
        _, target, args, kwargs = message
        set_activity("")
        try:
            answer = ("done", resolve_target(target)(*args, **kwargs))
        except BaseException as error:
            answer = ("failed", report_error(spec.label, error))
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            _send(connection, answer)
        except Exception as error:  # a result that cannot be pickled
            _send(connection, ("failed", report_error(spec.label, error)))
    # No destroy_process_group here: it may wait for peers that are busy ending, and the process ends anyway.
    stacks.flush()
    os._exit(0)


def _join_process_group(connection: Connection, spec: RankSpec) -> None:
    import torch
    import torch.distributed as dist

    store_timeout = timedelta(seconds=START_TIMEOUT_S)
    address = "127.0.0.1" if spec.network is None else spec.network.store_address
    store = None
    if spec.rank == 0:
        # Port 0 lets the system choose, which no other program can race for. The store would listen on every address
        # of this machine, and it asks nobody who they are: a socket of ours keeps it to the ranks' own.
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            spec.num_ranks,
            is_master=True,
            timeout=store_timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    # Imports take very different times on a busy machine: nobody's timeout runs before all are through.
    _send(connection, ("imported", None if store is None else store.port))
    kind, port = pickle.loads(connection.recv_bytes())
    assert kind == "meet"
    if store is None:
        store = dist.TCPStore(address, port, spec.num_ranks, is_master=False, timeout=store_timeout)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # whoever reads env:// is a client of that store
    if spec.backend == "nccl":
        torch.cuda.set_device(spec.rank % torch.cuda.device_count())
    timeout = timedelta(seconds=spec.collective_timeout_s)
    dist.init_process_group(spec.backend, store=store, rank=spec.rank, world_size=spec.num_ranks, timeout=timeout)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _send(connection: Connection, message: tuple) -> None:
    # Plain pickle, by value: torch's own reducers would pass tensors through shared memory that this process owns.
    connection.send_bytes(pickle.dumps(message))


# ---------------------------------------------------------------- the parent's side


class RankProcess:
    """The parent's handle on one rank process."""

    def __init__(self, spec: RankSpec, environment: Mapping[str, str]) -> None:
        self.spec = spec
        context = multiprocessing.get_context("spawn")
        self.connection, child_connection = context.Pipe()
        self.process = context.Process(target=serve, args=(child_connection, spec), name=spec.label, daemon=False)
        rank_environment = {
            "RANK": str(spec.rank),
            "LOCAL_RANK": str(spec.rank),
            "WORLD_SIZE": str(spec.num_ranks),
            "LOCAL_WORLD_SIZE": str(spec.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            **environment,
        }
        # The child reads its environment before any code of ours runs in it, hence set here and taken back.
        with _environment(rank_environment), interrupts_held():
            if not _live:
                atexit.unregister(_end_live)
                atexit.register(_end_live)  # runs before multiprocessing's own, which waits for the processes
            self.process.start()
            _live.add(self)
        child_connection.close()

    @property
    def label(self) -> str:
        return self.spec.label

    def send(self, *message: Any) -> None:
        """Sends a message; a rank that is gone is noticed by whoever waits for its answer."""
        payload = pickle.dumps(message)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(payload)

    def receive(self) -> tuple | None:
        """The message that is waiting, or None where the rank is gone and left none."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):  # the latter where it went in the middle of a message
            return None

    def report_death(self) -> RankReport:
        self.process.join(END_GRACE_S)
        exit_code = self.process.exitcode
        exit_code = -signal.SIGKILL if exit_code is None else exit_code
        return report_death(self.label, exit_code, stack=self._stack(), activity=self.activity())

    def activity(self) -> str:
        """What the rank said it was doing; to be read of a dead rank, too."""
        return read_activity(self.spec.activity_path)

    def request_stack(self) -> None:
        """Asks a rank that still runs to write down where it is."""
        with contextlib.suppress(ProcessLookupError):
            if self.process.is_alive():
                os.kill(self.process.pid, signal.SIGUSR1)

    def wait_for_stack(self) -> str:
        """What the rank's main thread was doing when asked; empty where it does not say."""
        deadline_s = time.monotonic() + STACK_DUMP_WAIT_S
        while True:
            stack = self._stack()
            if stack or time.monotonic() > deadline_s:
                return stack
            time.sleep(0.02)

    def _stack(self) -> str:
        try:
            return condensed_stack(Path(self.spec.stack_path).read_text(errors="replace"))
        except FileNotFoundError:
            return ""

    def signal_group(self, number: int) -> None:
        """Signals the rank and everything it started."""
        pid = self.process.pid
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):  # no group yet, or nobody left
            if self.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def end_processes(processes: list[RankProcess]) -> None:
    """Ends rank processes and what they started: SIGTERM, then after two seconds SIGKILL. Not interruptible."""
    with interrupts_held():
        for process in processes:
            process.signal_group(signal.SIGTERM)
        deadline_s = time.monotonic() + END_GRACE_S
        for process in processes:
            process.process.join(max(0.0, deadline_s - time.monotonic()))
        for process in processes:
            process.signal_group(signal.SIGKILL)
            process.process.join()
            process.connection.close()
            _live.discard(process)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Holds Ctrl-C back until the block ends; processes started inside begin with SIGINT blocked."""
    # Started first: as it starts, it unblocks SIGINT.
    multiprocessing.resource_tracker.ensure_running()
    # Blocking the signal covers this thread and the processes it starts; another thread may still take the
    # signal, and then Python runs the handler in the main thread.
    held: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    replace = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if replace:
        signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if replace:
            signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


def _end_live() -> None:
    end_processes(list(_live))


# A rank that slipped through everything else must not keep the interpreter from ending.
_live: weakref.WeakSet[RankProcess] = weakref.WeakSet()
