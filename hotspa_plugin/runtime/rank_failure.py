"""How a rank's work ends badly, and how that is told: the first cause first, in as few lines as possible."""

from __future__ import annotations

import dataclasses
import enum
import os
import pickle
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from hotspa_plugin.runtime.activity import current_activity

MAX_FRAMES_SHOWN = 6
MAX_LINES_SHOWN = 40

# What gloo, NCCL and the store say on a healthy rank whose peer went away or never came.
_PEER_LOST_TYPES = {"DistNetworkError", "DistStoreError", "DistBackendError", "BrokenPipeError", "ConnectionResetError"}
_PEER_LOST_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "timeout waiting",
    "gloo/transport",
    "socket timeout",
    "nccl error",
    "wait timeout",
)

_OWN_FILE = os.path.join("runtime", "rank_process.py")


class UserError(ValueError):
    """Something the user can put right: shown as its message alone, without a traceback; exit code 2."""


class FailureKind(enum.Enum):
    """Why a rank did not finish its work."""

    DIED = "died"  # ended without a word: a signal, os._exit
    USER = "user"  # raised an error that the user can put right
    RAISED = "raised"
    ABORTED = "aborted"  # SIGABRT: mostly a library that gives up because a peer is gone
    STUCK = "stuck"  # had to be ended while still at work
    PEER_LOST = "peer lost"  # its only trouble was another rank


EXIT_FAILURE, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130

_CAUSE_ORDER = {kind: position for position, kind in enumerate(FailureKind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's failure. ``time_s`` is monotonic, comparable between the processes of one machine."""

    label: str  # "rank 3" or "reference process"
    kind: FailureKind
    summary: str  # one line, such as "ValueError: no such file"
    detail: str = ""  # condensed traceback or stack, several lines
    activity: str = ""  # what the rank was doing, in words
    time_s: float = 0.0
    pickled_error: bytes | None = None  # the exception itself, where it survives pickling


class RankFailure(RuntimeError):
    """One or more ranks failed. ``reports`` are ordered, the most likely cause first."""

    def __init__(self, reports: Sequence[RankReport]) -> None:
        self.reports = tuple(sorted(reports, key=lambda report: (_CAUSE_ORDER[report.kind], report.time_s)))
        assert self.reports
        super().__init__(self._message())

    def __reduce__(self) -> tuple:
        return (RankFailure, (self.reports,))

    @property
    def cause(self) -> RankReport:
        return self.reports[0]

    @property
    def exit_code(self) -> int:
        """2 for what the user can put right, 1 for everything else."""
        return EXIT_USER_ERROR if self.cause.kind is FailureKind.USER else EXIT_FAILURE

    def _message(self) -> str:
        cause = self.cause
        if cause.kind is FailureKind.USER:
            return cause.summary
        lines = [f"{cause.label}: {cause.summary}{_during(cause)}"]
        if cause.detail:
            lines += ["    " + line for line in cause.detail.splitlines()]
        # Ranks that failed alike are named together: 8 ranks that say one thing say it once.
        followers: dict[str, list[str]] = {}
        for report in self.reports[1:]:
            followers.setdefault(_follower_summary(report), []).append(report.label)
        for summary, labels in followers.items():
            lines.append(f"{_join_labels(labels)}: {summary}")
        return "\n".join(lines)


def _follower_summary(report: RankReport) -> str:
    summary = report.summary
    if report.kind is FailureKind.PEER_LOST and any(part in summary.lower() for part in _PEER_LOST_TEXTS):
        summary = "lost contact with another rank"  # what the library says of it is long and says no more
    elif report.kind is FailureKind.STUCK and report.detail:
        summary = f"{summary}, at {report.detail.splitlines()[0]}"
    return summary + _during(report)


def _during(report: RankReport) -> str:
    return f" (during {report.activity})" if report.activity else ""


def _join_labels(labels: list[str]) -> str:
    if len(labels) > 1 and all(label.startswith("rank ") for label in labels):
        return "ranks " + ", ".join(label.removeprefix("rank ") for label in labels)
    return ", ".join(labels)


def is_user_error(error: BaseException) -> bool:
    """True where ``error`` is for the user to put right.

    That is a ``UserError``, or a plain ``ValueError`` raised by this package's own code: there it means
    bad input by convention, whereas one that torch or Megatron raises may be anybody's fault.
    """
    if isinstance(error, UserError):
        return True
    if type(error) is not ValueError or error.__traceback__ is None:
        return False
    innermost = traceback.extract_tb(error.__traceback__)[-1].filename
    package = Path(__file__).resolve().parent.parent
    return package in Path(innermost).resolve().parents


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and message for an error that ends a command; None for a bug, whose traceback is wanted.

    An error that a worker pool passed on as itself is told as what it was on its rank.
    """
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    failure = error if isinstance(error, RankFailure) else error.__cause__
    if isinstance(failure, RankFailure):
        code, message = failure.exit_code, str(failure)
    elif is_user_error(error):
        code, message = EXIT_USER_ERROR, str(error)
    else:
        return None
    if code == EXIT_USER_ERROR:
        message = "\n".join(f"error: {line}" for line in message.splitlines())
    return code, message


def is_peer_loss(error: BaseException) -> bool:
    """True where ``error``, or what it was raised from, only says that another rank is gone or late."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if type(seen).__name__ in _PEER_LOST_TYPES:
            return True
        if isinstance(seen, RuntimeError | OSError) and any(part in text for part in _PEER_LOST_TEXTS):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def report_error(label: str, error: BaseException) -> RankReport:
    """Describes an exception caught on a rank; called where it was caught, so that the traceback is there."""
    if is_user_error(error):
        return RankReport(
            label=label,
            kind=FailureKind.USER,
            summary=str(error),
            time_s=time.monotonic(),
            pickled_error=_pickle(error),
        )
    if isinstance(error, SystemExit):
        summary = f"called sys.exit({error.code!r})"
    else:
        first_line = (str(error).strip().splitlines() or [""])[0]
        summary = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    return RankReport(
        label=label,
        kind=FailureKind.PEER_LOST if is_peer_loss(error) else FailureKind.RAISED,
        summary=summary,
        detail=condensed_traceback(error),
        activity=current_activity(),
        time_s=time.monotonic(),
        pickled_error=_pickle(error),
    )


def report_death(label: str, exit_code: int, *, stack: str = "", activity: str = "") -> RankReport:
    """Describes a process that ended without reporting anything. ``exit_code`` is negative for a signal."""
    kind = FailureKind.DIED
    if exit_code < 0:
        name = _signal_name(-exit_code)
        summary = f"killed by {name}"
        if -exit_code == signal.SIGKILL:
            summary += ", on purpose or because memory ran out (see dmesg)"
        if -exit_code == signal.SIGABRT:
            kind = FailureKind.ABORTED
    else:
        summary = f"ended by itself with exit code {exit_code}, without an error of its own"
    return RankReport(label=label, kind=kind, summary=summary, detail=stack, activity=activity, time_s=time.monotonic())


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"


def condensed_traceback(error: BaseException) -> str:
    """The last frames of a traceback, chained causes included, shortened to some 40 lines."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename.endswith(_OWN_FILE):
        frames = frames.tb_next  # the frames that called the function say nothing
    lines = "".join(traceback.format_exception(type(error), error, frames, limit=-MAX_FRAMES_SHOWN))
    kept = lines.rstrip().splitlines()
    if len(kept) > MAX_LINES_SHOWN:
        kept = ["..."] + kept[-MAX_LINES_SHOWN:]
    return "\n".join(kept)


def condensed_stack(dump: str) -> str:
    """The main thread's last frames out of a faulthandler dump of all threads, latest call first."""
    blocks = [block for block in dump.split("\n\n") if "most recent call first" in block]
    current = [block for block in blocks if "Current thread" in block] or blocks[-1:]
    if not current:
        return ""
    frames = [line.strip() for line in current[0].splitlines() if line.strip().startswith("File ")]
    frames = [
        frame for frame in frames if not any(part in frame for part in (_OWN_FILE, "multiprocessing", "<string>"))
    ]
    return "\n".join(frames[:MAX_FRAMES_SHOWN])


def _pickle(error: BaseException) -> bytes | None:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # any class may define its own, broken, pickling
        return None
    return pickled
