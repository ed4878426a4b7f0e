"""Spans: who did what when. Each rank writes its own part file; merging makes a Chrome trace.

A part file, ``trace/rank00003.jsonl``, starts with a clock line, then one line per kept step. Times are
those of the monotonic clock, which all processes of one machine share; the clock line ties it to
wall-clock time. Merging takes, per machine, the tie of its lowest rank, so that ranks of one machine line
up exactly and ranks of different machines as well as their wall clocks do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic

from hotspa_plugin.runtime.run_record import PHASES, TRACE_FILE, TRACE_FOLDER

MAIN_TRACK = "main"
HIDDEN_TRACK = "overlapped"


@dataclasses.dataclass(kw_only=True)
class Span:
    """Something that a rank did from ``start_ns`` to ``end_ns`` (monotonic clock).

    ``args`` may be filled while the span is open. ``depth`` is 0 for a span inside no other; ``hidden``
    spans ran beside others and are drawn on a track of their own.
    """

    name: str
    args: dict[str, Any] = dataclasses.field(default_factory=dict)
    start_ns: int = 0
    end_ns: int = 0
    depth: int = 0
    hidden: bool = False

    @property
    def seconds(self) -> float:
        return max(0, self.end_ns - self.start_ns) * 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceSampling:
    """Which steps keep their spans: the ``first`` ones, then each ``every``-th, ``limit`` at most."""

    first: int = 20
    every: int = 50
    limit: int = 200
    max_spans_per_step: int = 5000

    def __post_init__(self) -> None:
        if self.first < 0 or self.every < 1 or self.limit < 0 or self.max_spans_per_step < 1:
            raise ValueError(f"trace sampling needs first >= 0, every >= 1, limit >= 0, got {self}")

    def keeps(self, step: int, *, num_seen: int, num_kept: int) -> bool:
        """Whether ``step``, after ``num_seen`` steps of this start of the run, keeps its spans."""
        return num_kept < self.limit and (num_seen < self.first or step % self.every == 0)


def machine_id() -> str:
    """Equal for processes whose monotonic clocks are one: the boot's id where Linux tells it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def part_path(directory: Path, rank: int) -> Path:
    return directory / TRACE_FOLDER / f"rank{rank:05d}.jsonl"


class TracePart:
    """Appends one rank's spans to its part file, opened at the first write."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = part_path(directory, rank)
        self._rank = rank
        self._file: Any = None

    def write(self, step: int, spans: list[Span], num_dropped: int = 0) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_for_append(self._path)
            clock = {
                "rank": self._rank,
                "host": socket.gethostname(),
                "machine": machine_id(),
                "pid": os.getpid(),
                "wall_ns": time.time_ns(),
                "monotonic_ns": time.perf_counter_ns(),
            }
            self._file.write(json.dumps(clock) + "\n")
        rows = [[s.name, s.start_ns, s.end_ns, s.depth, int(s.hidden), _plain(s.args)] for s in spans]
        line: dict[str, Any] = {"step": step, "spans": rows}
        if num_dropped:
            line["num_dropped"] = num_dropped
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def open_for_append(path: Path) -> Any:
    """Opens a file of lines to add more, after removing a last line that a crash left unfinished."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)
    return open(path, "a", encoding="utf-8", newline="\n")


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments that JSON can say: it has no word for NaN and infinity."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in args.items()}


class _Clock(pydantic.BaseModel):
    rank: int
    host: str
    machine: str
    pid: int = 0
    wall_ns: int
    monotonic_ns: int


class _StepSpans(pydantic.BaseModel):
    step: int
    spans: list[tuple[str, int, int, int, bool, dict[str, Any]]]
    num_dropped: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSpans:
    """One rank's spans per kept step; times in nanoseconds since the epoch."""

    rank: int
    host: str
    steps: dict[int, tuple[Span, ...]]


def read_part_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines with their numbers. A last line without its newline is what a crash leaves: left out."""
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            if line.strip():
                yield number, line


def read_spans(directory: Path) -> tuple[RankSpans, ...]:
    """All ranks' spans, aligned, by rank. Where a resumed run repeated a step, the later one counts.

    Raises ValueError naming file and line where a line is damaged.
    """
    parts: dict[int, list[tuple[_Clock, _StepSpans]]] = {}
    offset_ns: dict[str, tuple[int, int]] = {}  # machine -> (rank whose tie counts, wall minus monotonic)
    for path in sorted((directory / TRACE_FOLDER).glob("rank*.jsonl")):
        clock: _Clock | None = None
        for number, line in read_part_lines(path):
            try:
                if '"wall_ns"' in line and '"spans"' not in line:
                    clock = _Clock.model_validate_json(line)
                    tie = (clock.rank, clock.wall_ns - clock.monotonic_ns)
                    if clock.machine not in offset_ns or tie[0] < offset_ns[clock.machine][0]:
                        offset_ns[clock.machine] = tie
                    parts.setdefault(clock.rank, [])
                    continue
                step = _StepSpans.model_validate_json(line)
            except pydantic.ValidationError as error:
                raise ValueError(f"{path}, line {number}: damaged ({first_error(error)}); remove that line") from None
            if clock is None:
                raise ValueError(f"{path}: the clock line is missing at its start; remove the file")
            parts[clock.rank].append((clock, step))
    ranks = []
    for rank, rows in sorted(parts.items()):
        steps = {}
        for clock, step in rows:
            shift = offset_ns[clock.machine][1]
            steps[step.step] = tuple(
                Span(name=n, start_ns=a + shift, end_ns=b + shift, depth=d, hidden=h, args=args)
                for n, a, b, d, h, args in step.spans
            )
        host = rows[-1][0].host if rows else ""
        ranks.append(RankSpans(rank=rank, host=host, steps=dict(sorted(steps.items()))))
    return tuple(ranks)


def first_error(error: pydantic.ValidationError) -> str:
    """The first complaint of a failed validation on one line, with the field's place."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = " ".join(str(first["msg"]).split())
    return f"{place}: {message}" if place else message


def trace_events(ranks: tuple[RankSpans, ...]) -> dict[str, Any]:
    """The Chrome trace event form: one process per rank, one thread per track, times in microseconds."""
    start_ns = min((s.start_ns for r in ranks for spans in r.steps.values() for s in spans), default=0)
    events: list[dict[str, Any]] = []
    for r in ranks:
        events.append(_metadata("process_name", r.rank, 0, name=f"rank {r.rank} ({r.host})"))
        events.append(_metadata("process_sort_index", r.rank, 0, sort_index=r.rank))
        for thread, track in enumerate((MAIN_TRACK, HIDDEN_TRACK)):
            events.append(_metadata("thread_name", r.rank, thread, name=track))
            events.append(_metadata("thread_sort_index", r.rank, thread, sort_index=thread))
        for step, spans in r.steps.items():
            for span in spans:
                events.append(
                    {
                        "ph": "X",
                        "name": span.name,
                        "cat": span.name if span.name in PHASES else "detail",
                        "pid": r.rank,
                        "tid": int(span.hidden),
                        "ts": (span.start_ns - start_ns) / 1000,
                        "dur": max(0, span.end_ns - span.start_ns) / 1000,
                        "args": {"step": step, **span.args},
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"start_unix_ns": str(start_ns)}}


def _metadata(name: str, pid: int, tid: int, /, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def merge_trace(directory: str | os.PathLike[str]) -> Path:
    """Writes ``trace.json`` from the part files of all ranks; may be called again at any time."""
    directory = Path(directory)
    path = directory / TRACE_FILE
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(trace_events(read_spans(directory))), encoding="utf-8")
    os.replace(part, path)
    return path
