"""Recording a run: spans on every rank, one line per step on rank 0. Needs no process group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pydantic

from hotspa_plugin.runtime.run_record import (
    PHASES,
    RUN_FILE,
    STEPS_FILE,
    TRACE_FOLDER,
    RunInfo,
    StepRecord,
    StepSeconds,
    write_json,
)
from hotspa_plugin.runtime.trace import Span, TracePart, TraceSampling, first_error, merge_trace, open_for_append


def check_run_directory(directory: str | os.PathLike[str], *, resume: bool = False) -> Path:
    """Raises ValueError where ``directory`` is no place for a run's records; changes nothing.

    Call it before ranks are started, so that a mistake costs no start. Only a resumed run may go where
    records lie already.
    """
    if not str(directory):
        raise ValueError("output folder: its name is empty; name a folder with --out")
    directory = Path(directory)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output folder {directory} is a file; give a new folder with --out")
    held = [name for name in (RUN_FILE, STEPS_FILE) if (directory / name).exists()]
    held += [TRACE_FOLDER] if any((directory / TRACE_FOLDER).glob("rank*.jsonl")) else []
    if held and not resume:
        raise ValueError(
            f"output folder {directory} holds another run ({', '.join(held)}); give a new folder with --out, "
            "or resume that run"
        )
    existing = next(place for place in (directory.absolute(), *directory.absolute().parents) if place.exists())
    # Kernel file systems say they are writable to root, and are not.
    if not os.access(existing, os.W_OK | os.X_OK) or existing.parts[1:2] in (("proc",), ("sys",)):
        raise ValueError(f"output folder {directory} cannot be made or written in {existing}; give another with --out")
    return directory


class RunRecorder:
    """Writes one run's records; one per rank, all given the same ``directory``.

    Rank 0 writes ``run.json`` at once and a line of ``steps.jsonl`` per step; every rank writes the spans
    of the steps that ``sampling`` keeps. Lines are flushed as they are written, so that a crash leaves
    readable files.

    ``resume`` appends to the run that the folder holds (or starts one where it holds none); ``first_step``
    is then the step it goes on with. Where the
    device runs behind the host, ``synchronize`` (such as ``torch.cuda.synchronize``) is called at both
    ends of each span; without it a span tells when work was queued.

    Raises ValueError on rank 0 where the folder holds another run; nothing is written then.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int,
        world_size: int,
        *,
        info: RunInfo | None = None,
        resume: bool = False,
        first_step: int = 0,
        sampling: TraceSampling | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not below the world size {world_size}")
        self.directory = Path(directory)
        self.rank = rank
        self.enabled = True
        self._sampling = sampling or TraceSampling()
        self._synchronize = synchronize
        self._spans: list[Span] = []
        self._num_dropped = 0
        self._depth = 0
        self._num_seen = self._num_kept = 0
        self._next_step = first_step
        self._step_start_ns = time.perf_counter_ns()
        self._part = TracePart(self.directory, rank)
        self._steps: Any = None
        if rank == 0:
            if info is None:
                raise ValueError("rank 0 needs the run's info (a RunInfo) to record")
            self._start(info, resume)

    def _start(self, info: RunInfo, resume: bool) -> None:
        # Other ranks may have written first lines of this run already where nothing kept them in step,
        # so their part files alone are not taken for another run's: check_run_directory does that.
        if self.directory.exists() and not self.directory.is_dir():
            check_run_directory(self.directory)
        held = (self.directory / RUN_FILE).exists() or (self.directory / STEPS_FILE).exists()
        if held:
            check_run_directory(self.directory, resume=resume)
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / RUN_FILE
        if path.exists():
            try:
                info = info.after(RunInfo.model_validate_json(path.read_text(encoding="utf-8")))
            except pydantic.ValidationError as error:
                raise ValueError(f"{path} is damaged ({first_error(error)}); give a new folder with --out") from None
        write_json(path, info)
        self._steps = open_for_append(self.directory / STEPS_FILE)

    @contextlib.contextmanager
    def span(self, name: str, **args: Any) -> Iterator[Span]:
        """Times the block. Name it after a phase where it is one (``plan``, ``data``, ``switch``, ...).

        ``args`` (such as ``bucket``, ``strategy``, ``bytes_remote``) show in the trace; more can be put
        into the yielded span's ``args``, whose ``seconds`` are known after the block.
        """
        if self._synchronize:
            self._synchronize()
        span = Span(name=name, args=args, depth=self._depth, start_ns=time.perf_counter_ns())
        self._depth += 1
        try:
            yield span
            if self._synchronize:
                self._synchronize()
        finally:
            span.end_ns = time.perf_counter_ns()
            self._depth -= 1
            self._keep(span)

    def add_hidden(self, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        """Adds work that ran beside other spans; times from ``time.perf_counter_ns``."""
        self._keep(Span(name=name, args=args, start_ns=start_ns, end_ns=end_ns, hidden=True))

    def _keep(self, span: Span) -> None:
        if len(self._spans) < self._sampling.max_spans_per_step:
            self._spans.append(span)
        else:
            self._num_dropped += 1

    def seconds(self) -> StepSeconds:
        """Exposed seconds per phase since the last finished step (or since the recorder was made).

        A phase's span inside a span of another phase counts for the inner phase only.
        """
        # Self time: walking outermost first by start, each phase span is charged to its own phase and
        # taken off the phase that encloses it.
        exposed_ns = dict.fromkeys(PHASES, 0)
        enclosing: list[Span] = []
        phases = (s for s in self._spans if s.name in exposed_ns and not s.hidden)
        for span in sorted(phases, key=lambda s: (s.start_ns, s.depth)):
            while enclosing and enclosing[-1].end_ns <= span.start_ns:
                enclosing.pop()
            duration_ns = span.end_ns - span.start_ns
            exposed_ns[span.name] += duration_ns
            if enclosing:
                exposed_ns[enclosing[-1].name] -= duration_ns
            enclosing.append(span)
        total_s = (time.perf_counter_ns() - self._step_start_ns) * 1e-9
        return StepSeconds(total=total_s, **{phase: max(0, ns) * 1e-9 for phase, ns in exposed_ns.items()})

    def hidden_s(self) -> dict[str, float]:
        """Seconds per phase of work that ran beside other spans, since the last finished step."""
        hidden: dict[str, float] = {}
        for span in self._spans:
            if span.hidden and span.name in PHASES:
                hidden[span.name] = hidden.get(span.name, 0.0) + span.seconds
        return hidden

    def start_step(self) -> None:
        """Starts the step's clock anew, leaving out what happened since the last one (evaluation, saving)."""
        self._spans, self._num_dropped = [], 0
        self._step_start_ns = time.perf_counter_ns()

    def finish_step(self, record: StepRecord | int) -> None:
        """Ends a step. Rank 0 gives its record, the others theirs or only the step's number."""
        step = record if isinstance(record, int) else record.step
        if self._steps is not None:
            assert isinstance(record, StepRecord), "rank 0 finishes a step with its record"
            self._steps.write(record.model_dump_json(exclude_none=True) + "\n")
            self._steps.flush()
        if self._sampling.keeps(step, num_seen=self._num_seen, num_kept=self._num_kept):
            self._part.write(step, self._spans, self._num_dropped)
            self._num_kept += 1
        self._num_seen += 1
        self._next_step = step + 1
        self.start_step()

    def close(self, *, merge: bool = True) -> None:
        """Ends recording; rank 0 merges all ranks' spans into ``trace.json``.

        Wait for the other ranks before rank 0 closes, or call ``merge_trace`` later. Spans of a step that
        did not finish are kept: they show what a crash interrupted.
        """
        if not self.enabled:
            return
        self.enabled = False
        if any(span.name in PHASES for span in self._spans):
            self._part.write(self._next_step, self._spans, self._num_dropped)
        self._part.close()
        if self._steps is not None:
            self._steps.close()
            if merge:
                merge_trace(self.directory)

    def __enter__(self) -> RunRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A merge that fails must not stand in front of the error that ended the run.
        self.close(merge=kind is None)


class NullRecorder:
    """Records nothing, with the same methods: what code that records is given where nobody asked."""

    enabled = False
    _seconds = StepSeconds(total=0.0)

    def span(self, name: str, **args: Any) -> contextlib.AbstractContextManager[Span]:
        return _NULL_SPAN

    def add_hidden(self, name: str, start_ns: int, end_ns: int, **args: Any) -> None:
        return None

    def seconds(self) -> StepSeconds:
        return self._seconds

    def hidden_s(self) -> dict[str, float]:
        return {}

    def start_step(self) -> None:
        return None

    def finish_step(self, record: StepRecord | int) -> None:
        return None

    def close(self, *, merge: bool = True) -> None:
        return None

    def __enter__(self) -> NullRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class _NullSpan(contextlib.AbstractContextManager):  # reentrant: it holds no state
    @property
    def args(self) -> dict[str, Any]:
        return {}  # a fresh one, so that what is put there is gone

    @property
    def seconds(self) -> float:
        return 0.0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None


_NULL_SPAN = _NullSpan()
