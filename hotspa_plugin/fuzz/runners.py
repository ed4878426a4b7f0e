"""Run one case: switches in this process, or a whole step on ranks that stay alive from case to case."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from hotspa_plugin.fuzz import outcome
from hotspa_plugin.fuzz.case import FuzzCase, check_at_start
from hotspa_plugin.fuzz.outcome import Outcome, Status
from hotspa_plugin.fuzz.switches import Refused, WrongNumbers, run_switches
from hotspa_plugin.runtime.rank_failure import FailureKind, RankFailure
from hotspa_plugin.runtime.worker_pool import WorkerPool

if TYPE_CHECKING:
    from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase

_WORKER = "hotspa_plugin.fuzz.step_worker"


class Runner(Protocol):
    """Runs cases of one kind; a context manager."""

    def run(self, case: FuzzCase) -> Outcome: ...


class SwitchRunner:
    """Switches and flushes by loopback."""

    def __enter__(self) -> SwitchRunner:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, case: FuzzCase) -> Outcome:
        try:
            run_switches(case)
        except Refused as refusal:
            return outcome.refused(case, user_message(refusal.__cause__))
        except WrongNumbers as wrong:
            return Outcome(case=case, status=Status.WRONG, detail=str(wrong))
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
            return Outcome(case=case, status=Status.CRASHED, detail=f"{type(error).__name__}: {error}")
        return outcome.verified(case)


class StepRunner:
    """Whole steps; the pool of ranks is kept as long as cases want its number of ranks, and no case broke it.

    A case that takes longer than ``timeout_s`` hangs.
    """

    def __init__(self, *, timeout_s: float, env: Mapping[str, str] | None = None) -> None:
        self._timeout_s = timeout_s
        self._env = env or {}
        self._pool: WorkerPool | None = None

    def __enter__(self) -> StepRunner:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def run(self, case: FuzzCase) -> Outcome:
        try:
            check_at_start(case)
        except ValueError as refusal:
            return outcome.refused(case, user_message(refusal))
        workers = self._workers(case.num_ranks)
        try:
            return _run_step(workers, case, self._timeout_s)
        except Exception as error:  # noqa: BLE001 (whatever it is, it is a finding)
            return _failed(case, error)

    def _workers(self, num_ranks: int) -> WorkerPool:
        if self._pool is None or self._pool.num_ranks != num_ranks:
            self.__exit__()
            self._pool = WorkerPool(
                num_ranks,
                extra_reference=True,
                device="cpu",
                env=self._env,
                collective_timeout_s=self._timeout_s,
                settle_s=1.0,
            )
        elif not self._pool.usable:
            self._pool.restart()
        return self._pool


def _run_step(workers: WorkerPool, case: FuzzCase, timeout_s: float) -> Outcome:
    from hotspa_plugin.fuzz.step_worker import verify_case_of
    from hotspa_plugin.integrations.megatron.verify import FP32_BOUND, build_report

    verify = verify_case_of(case)
    answers, rows = _verify(workers, verify, timeout_s)
    refusals = [answer["refused"] for answer in answers if "refused" in answer]
    if refusals:
        if len(refusals) < len(answers):
            some = f"refused on {len(refusals)} ranks only: {refusals[0]}"
            return Outcome(case=case, status=Status.LATE, detail=some)
        return outcome.refused(case, refusals[0])
    if case.dtype == "fp32" and any(not error <= FP32_BOUND for row in rows for _, error in row["errors"]):
        answers, rows = _verify(workers, dataclasses.replace(verify, keep_static=True), timeout_s)
        for row in rows:
            judged = [(name, error) for name, error in row["errors"] if name not in row["ill_conditioned"]]
            row["errors"] = judged or [("", 0.0)]
    report = build_report(verify, answers[0], rows)
    if report["exact"]:
        return outcome.verified(case)
    return Outcome(case=case, status=Status.WRONG, detail="; ".join(report["problems"]))


def _verify(
    workers: WorkerPool, case: VerifyCase, timeout_s: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the ranks answered, and the reference's rows where none of them refused."""
    with tempfile.TemporaryDirectory(prefix="hotspa-fuzz-") as folder:
        answers = workers.run(f"{_WORKER}:run_ranks", case=case, folder=folder, timeout_s=timeout_s)
        if any("refused" in answer for answer in answers):
            return answers, []
        rows = workers.run_reference(
            f"{_WORKER}:run_reference", case=case, pool_world_size=workers.num_ranks, folder=folder, timeout_s=timeout_s
        )
    return answers, rows


def _failed(case: FuzzCase, error: Exception) -> Outcome:
    failure = error if isinstance(error, RankFailure) else error.__cause__
    if isinstance(failure, RankFailure):
        cause = failure.cause
        status = {
            FailureKind.STUCK: Status.HUNG,
            FailureKind.PEER_LOST: Status.HUNG,
            FailureKind.USER: Status.LATE,
        }.get(cause.kind, Status.CRASHED)
        return Outcome(case=case, status=status, detail=str(failure))
    return Outcome(case=case, status=Status.CRASHED, detail=f"{type(error).__name__}: {error}")


def user_message(error: ValueError) -> str:
    """What a command would print: pydantic's own report says more than its first line."""
    errors = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    return "; ".join(str(item["msg"]).removeprefix("Value error, ") for item in errors())


def timed(runner: Runner, case: FuzzCase) -> Outcome:
    """The outcome of one case, with what it took."""
    started_s = time.monotonic()
    return dataclasses.replace(runner.run(case), seconds=time.monotonic() - started_s)
