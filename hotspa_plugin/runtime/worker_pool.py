"""Rank processes that stay alive across many calls."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hotspa_plugin.runtime.rank_failure import FailureKind, RankFailure, RankReport
from hotspa_plugin.runtime.rank_process import START_TIMEOUT_S, RankProcess, RankSpec, end_processes, interrupts_held

SETTLE_S = 5.0  # after the first error: how long the other ranks have to come back on their own
PEER_SETTLE_S = 1.0  # the same of a pool that is given up anyway

Target = str | Callable[..., Any]


def count_gpus() -> int:
    """Number of GPUs that torch sees; 0 without importing torch where there is no driver."""
    if not any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    import torch

    return torch.cuda.device_count()


def rank_environment(num_ranks: int, device: str) -> dict[str, str]:
    """Environment variables of local ranks, those left out that the user has set already."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, num_cores // num_ranks)
    wanted = {"OMP_NUM_THREADS": str(num_threads)}
    if Path("/sys/class/net/lo").exists():
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo trusts the host name, which may resolve to nothing
    environment = {name: value for name, value in wanted.items() if name not in os.environ}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def choose_device(device: str, num_ranks: int) -> str:
    """``cpu`` or ``cuda``; ``auto`` takes CUDA where every rank gets a GPU of its own."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r}: choose auto, cpu or cuda")
    if device == "cpu":
        return "cpu"
    num_gpus = count_gpus()
    if device == "cuda" and num_gpus < num_ranks:
        raise ValueError(
            f"device cuda: {num_ranks} ranks need as many GPUs, this machine has {num_gpus}: "
            "use fewer ranks or device cpu"
        )
    return "cuda" if 0 < num_ranks <= num_gpus else "cpu"


class WorkerPool:
    """``num_ranks`` local rank processes with torch.distributed initialised, kept for many calls.

    ``extra_reference`` adds one process with a world of its own of size 1, the one-process baseline.
    ``device`` is auto, cpu or cuda; ``env`` adds environment variables to the ranks'. No collective
    waits longer than ``collective_timeout_s``.

    An error on *every* rank leaves the pool usable. Where only some ranks failed, or one died or got
    stuck, the others may be out of step: the pool is closed, further calls raise ``RuntimeError`` and
    ``restart()`` starts it anew.

        with WorkerPool(4) as pool:
            losses = pool.run("package.module:train_one_step", seed=1)
    """

    def __init__(
        self,
        num_ranks: int,
        extra_reference: bool = False,
        *,
        device: str = "auto",
        env: Mapping[str, str] | None = None,
        collective_timeout_s: float = 120.0,
        call_timeout_s: float | None = 600.0,
        settle_s: float = SETTLE_S,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"{num_ranks} ranks: at least 1 is needed")
        self.num_ranks = num_ranks
        self.device = choose_device(device, num_ranks)
        self._extra_reference = extra_reference
        self._env = dict(env or {})
        self._collective_timeout_s = collective_timeout_s
        self._call_timeout_s = call_timeout_s
        self._settle_s = settle_s
        self._ranks: list[RankProcess] = []
        self._reference: RankProcess | None = None
        self._closed_because = ""
        self._start()

    # ------------------------------------------------------------ life

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hotspa-ranks-")
        self._closed_because = ""
        try:
            environment = {**rank_environment(self.num_ranks, self.device), **self._env}
            with interrupts_held():  # until each process is where it will be ended
                for rank in range(self.num_ranks):
                    self._ranks.append(RankProcess(self._spec(f"rank {rank}", rank, self.num_ranks), environment))
                if self._extra_reference:
                    self._reference = RankProcess(self._spec("reference process", 0, 1), environment)
            self._await_ready()
        except BaseException:
            self._end("it did not start")
            raise

    def _spec(self, label: str, rank: int, num_ranks: int) -> RankSpec:
        return RankSpec(
            label=label,
            rank=rank,
            num_ranks=num_ranks,
            backend="nccl" if self.device == "cuda" else "gloo",
            collective_timeout_s=self._collective_timeout_s,
            stack_path=str(Path(self._folder.name) / f"{label}.stack"),
            activity_path=str(Path(self._folder.name) / f"{label}.activity"),
        )

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        worlds = [self._ranks] + ([[self._reference]] if self._reference else [])
        imported: dict[RankProcess, int | None] = {}
        waiting = self._everyone()
        while waiting:
            answers, reports = self._collect(waiting, deadline_s, "start", settle_s=PEER_SETTLE_S, one_message=True)
            if reports:
                raise RankFailure(reports)
            for process, message in answers.items():
                if message[0] == "ready":
                    waiting.remove(process)
                    continue
                imported[process] = message[1]
                world = next(world for world in worlds if process in world)
                if all(member in imported for member in world):
                    for member in world:
                        member.send("meet", imported[world[0]])

    def _everyone(self) -> list[RankProcess]:
        return self._ranks + ([self._reference] if self._reference else [])

    @property
    def usable(self) -> bool:
        """False once closed, by ``close`` or by a failure."""
        return not self._closed_because

    def close(self) -> None:
        """Ends all ranks; harmless when called twice."""
        if not self.usable:
            return
        for process in self._everyone():
            process.send("stop")
        deadline_s = time.monotonic() + 1.0
        for process in self._everyone():
            process.process.join(max(0.0, deadline_s - time.monotonic()))
        self._end("it was closed")

    def restart(self) -> None:
        """Closes the pool where it is open, and starts it anew."""
        self.close()
        self._start()

    def _end(self, why: str) -> None:
        self._closed_because = why
        end_processes(self._everyone())
        self._ranks, self._reference = [], None
        self._folder.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ calls

    def run(self, target: Target, /, *, timeout_s: float | None = None, **kwargs: Any) -> list[Any]:
        """Calls ``target(**kwargs)`` on every rank; returns the results in rank order.

        ``target`` is a module-level function or ``"package.module:function"``. An error comes back as
        itself, raised from a ``RankFailure`` that holds the rank's traceback; a rank that died or was
        stuck for more than ``timeout_s`` (default: the pool's ``call_timeout_s``) as a ``RankFailure``.
        """
        return self._call(self._ranks, target, [()] * self.num_ranks, kwargs, timeout_s)

    def run_reference(self, target: Target, /, *, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Calls ``target(**kwargs)`` in the reference process; returns its result. Errors as for ``run``."""
        if not self._extra_reference:
            raise ValueError("this pool has no reference process: create it with extra_reference=True")
        return self._call([self._reference], target, [()], kwargs, timeout_s)[0]

    def run_positional(
        self, target: Target, args_of_rank: Sequence[tuple], timeout_s: float | None = None
    ) -> list[Any]:
        """Calls ``target(*args_of_rank[rank])`` on every rank; raises ``RankFailure`` for any error."""
        return self._call(self._ranks, target, args_of_rank, {}, timeout_s, raise_original=False)

    def _call(
        self,
        processes: list[RankProcess | None],
        target: Target,
        args: Sequence[tuple],
        kwargs: dict[str, Any],
        timeout_s: float | None,
        raise_original: bool = True,
    ) -> list[Any]:
        if not self.usable:
            raise RuntimeError(
                f"this worker pool cannot be used any more: {self._closed_because}; restart() starts it anew"
            )
        called = [process for process in processes if process is not None]
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        try:
            for process, own_args in zip(called, args, strict=True):
                process.send("call", target, own_args, kwargs)
            deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
            answers, reports = self._collect(called, deadline_s, f"finish within {timeout_s} s", self._settle_s)
        except BaseException as error:  # Ctrl-C, or arguments that cannot be pickled
            self._end(f"a call ended with {type(error).__name__}")
            raise
        if not reports:
            return [answers[process][1] for process in called]
        failure = RankFailure(reports)
        all_raised = len(reports) == len(called) and all(
            report.kind in (FailureKind.USER, FailureKind.RAISED) for report in reports
        )
        if not all_raised:
            self._end(f"{failure.cause.label} failed before ({failure.cause.summary})")
        original = failure.cause.pickled_error if raise_original else None
        if original is not None:
            raise pickle.loads(original) from failure
        raise failure

    def _collect(
        self,
        processes: list[RankProcess],
        deadline_s: float | None,
        aim: str,
        settle_s: float,
        one_message: bool = False,
    ) -> tuple[dict[RankProcess, tuple], list[RankReport]]:
        """Waits for an answer of every process (or, with ``one_message``, of any), or for the first failures.

        After a failure the others get ``settle_s`` to answer too, for two reasons: the cause may be a
        rank whose end is noticed last, and a pool where every rank raised the same stays usable.
        """
        answers: dict[RankProcess, tuple] = {}
        reports: list[RankReport] = []
        waiting = list(processes)
        out_of_time = False
        while waiting and not (one_message and answers):
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            ready = wait([item for p in waiting for item in (p.connection, p.process.sentinel)], left_s)
            if not ready:
                out_of_time = True
                break
            num_reports_before = len(reports)
            for process in list(waiting):
                if process.connection not in ready and process.process.sentinel not in ready:
                    continue
                message = process.receive() if process.connection.poll() else None
                if message is None:
                    reports.append(process.report_death())
                elif message[0] == "failed":
                    reports.append(message[1])
                else:
                    answers[process] = message
                waiting.remove(process)
            if reports and not num_reports_before:
                dead = any(report.kind is FailureKind.DIED for report in reports)
                settle_deadline_s = time.monotonic() + (min(settle_s, PEER_SETTLE_S) if dead else settle_s)
                deadline_s = settle_deadline_s if deadline_s is None else min(deadline_s, settle_deadline_s)
        if out_of_time:
            reports += _report_stuck(waiting, aim, while_others_failed=bool(reports))
        return answers, reports


def _report_stuck(processes: list[RankProcess], aim: str, while_others_failed: bool) -> list[RankReport]:
    for process in processes:
        process.request_stack()
    summary = "was still at work and had to be ended" if while_others_failed else f"did not {aim}"
    reports = []
    for process in processes:
        reports.append(
            RankReport(
                label=process.label,
                kind=FailureKind.STUCK,
                summary=summary,
                detail=process.wait_for_stack(),
                activity=process.activity(),
                time_s=time.monotonic(),
            )
        )
    return reports
