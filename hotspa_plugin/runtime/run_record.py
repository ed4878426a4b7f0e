"""What a run writes into its output folder: the format, as pydantic models.

A folder holds ``run.json`` (one ``RunInfo``), ``steps.jsonl`` (one ``StepRecord`` per line), ``trace/``
(spans of every rank, see ``trace.py``), ``trace.json`` (the same merged, for Perfetto) and, where a run was
compared with static strategies, ``comparison.json`` (one ``Comparison``). ``docs/records.md`` describes
each field.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import os
import platform
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

FORMAT_VERSION = 1
RUN_FILE, STEPS_FILE, TRACE_FILE, TRACE_FOLDER = "run.json", "steps.jsonl", "trace.json", "trace"
COMPARISON_FILE = "comparison.json"
PHASES = ("plan", "data", "switch", "compute", "flush", "optimizer")

Phase = Literal["plan", "data", "switch", "compute", "flush", "optimizer"]
Count = Annotated[int, pydantic.Field(ge=0)]
Seconds = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class _Record(pydantic.BaseModel):
    # A misspelt field must fail where it is written, not vanish. Losses may be NaN or infinite: a run
    # that diverges is one whose records are wanted most, so such values travel as the strings "NaN" and
    # "Infinity", which JSON (unlike the bare words) allows.
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class BucketRecord(_Record):
    """One bucket of one step. Seconds are those of the recording rank, bytes are sums over all ranks."""

    bound_tokens: Count
    strategy: str
    sequences: Count
    tokens: Count  # true tokens, padding left out
    padding_tokens: Count = 0
    num_micro_batches: Count = 0  # largest over the data-parallel ranks
    switch_s: Seconds = 0.0  # exposed
    compute_s: Seconds = 0.0
    flush_s: Seconds = 0.0  # exposed
    switch_hidden_s: Seconds = 0.0  # beside other work
    flush_hidden_s: Seconds = 0.0
    switch_bytes_local: Count = 0  # copied inside a rank
    switch_bytes_remote: Count = 0  # sent to another rank
    flush_bytes_local: Count = 0
    flush_bytes_remote: Count = 0
    peak_memory_bytes: Count | None = None  # largest over ranks, while this bucket ran


class StepSeconds(_Record):
    """Exposed seconds per phase: time in which the recording rank did nothing but this."""

    plan: Seconds = 0.0
    data: Seconds = 0.0
    switch: Seconds = 0.0
    compute: Seconds = 0.0
    flush: Seconds = 0.0
    optimizer: Seconds = 0.0
    total: Seconds

    @property
    def other(self) -> float:
        """Seconds of the step that no phase accounts for."""
        return max(0.0, self.total - sum(getattr(self, phase) for phase in PHASES))


class StepRecord(_Record):
    """One optimizer step, as rank 0 saw it. ``tokens_per_s`` counts true tokens of the whole batch."""

    step: Count
    loss: float  # mean over the target tokens of the global batch
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens: Count
    target_tokens: Count
    sequences: Count
    tokens_per_s: Annotated[float, pydantic.Field(ge=0)]
    seconds: StepSeconds
    hidden_s: dict[Phase, Seconds] = {}  # time that ran beside compute
    peak_memory_bytes: Count | None = None  # largest over ranks
    resident_memory_bytes: Count | None = None  # largest over ranks, at the end of the step
    buckets: tuple[BucketRecord, ...] = ()


class PoolEntry(_Record):
    """One strategy of the pool and the longest sequence it takes."""

    strategy: str
    bound_tokens: Count


class ModelInfo(_Record):
    name: str
    num_parameters: Count | None = None
    dtype: str | None = None
    config: dict[str, Any] = {}


class LengthHistogram(_Record):
    """``counts[i]`` sequences are longer than ``edges_tokens[i]`` and at most ``edges_tokens[i + 1]`` tokens.

    A bin ends with its upper edge, as a bucket does with its bound: a sequence cut at 4096 tokens is
    counted below that bound's line, not beyond it.
    """

    edges_tokens: tuple[Annotated[float, pydantic.Field(allow_inf_nan=False)], ...]
    counts: tuple[Count, ...]

    @pydantic.model_validator(mode="after")
    def _check(self) -> LengthHistogram:
        if len(self.edges_tokens) != len(self.counts) + 1:
            raise ValueError(
                f"{len(self.counts)} counts need {len(self.counts) + 1} edges, not {len(self.edges_tokens)}"
            )
        if any(a >= b for a, b in zip(self.edges_tokens[:-1], self.edges_tokens[1:], strict=True)):
            raise ValueError("edges_tokens must ascend")
        return self

    @classmethod
    def from_lengths(cls, lengths_tokens: Iterable[int], bins_per_octave: int = 4) -> LengthHistogram:
        """Counts lengths (at least 1 token each) in bins of equal width on a log scale."""
        octaves: dict[int, int] = {}
        for length in lengths_tokens:
            if length < 1:
                raise ValueError(f"a sequence of {length} tokens has no place in a length histogram; leave it out")
            # log2 is exact for powers of two, and no other whole length sits on an edge.
            index = math.ceil(bins_per_octave * math.log2(length)) - 1
            octaves[index] = octaves.get(index, 0) + 1
        if not octaves:
            return cls(edges_tokens=(1.0,), counts=())
        first, last = min(octaves), max(octaves)
        return cls(
            edges_tokens=tuple(2.0 ** (i / bins_per_octave) for i in range(first, last + 2)),
            counts=tuple(octaves.get(i, 0) for i in range(first, last + 1)),
        )


class DataInfo(_Record):
    """The data as the run reads it, after cutting."""

    source: str
    num_sequences: Count
    num_tokens: Count
    longest_tokens: Count | None = None
    num_truncated: Count = 0
    num_split: Count = 0
    num_dropped: Count = 0
    lengths: LengthHistogram | None = None


class MachineInfo(_Record):
    host: str
    device: str  # "cpu", or the accelerator's name
    num_nodes: Count = 1
    num_cpus: Count | None = None
    memory_bytes: Count | None = None  # of the machine's main memory
    system: str | None = None

    @classmethod
    def here(cls, *, device: str = "cpu") -> MachineInfo:
        """This machine; what the system does not tell stays None. A launcher such as torchrun tells the nodes."""
        num_ranks = int(os.environ.get("WORLD_SIZE", 1))
        try:
            memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            memory_bytes = None
        return cls(
            host=socket.gethostname(),
            device=device,
            num_nodes=max(1, num_ranks // int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))),
            num_cpus=os.cpu_count(),
            memory_bytes=memory_bytes,
            system=platform.platform(terse=True),
        )


class SessionInfo(_Record):
    """An earlier start of the same run, before it was resumed."""

    started_at: str
    world_size: Count
    pool: tuple[PoolEntry, ...]
    versions: dict[str, str] = {}


class RunInfo(_Record):
    """What stays the same over a run. ``started_at`` is ISO 8601 in UTC."""

    format_version: int = FORMAT_VERSION
    started_at: str = pydantic.Field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    )
    command: str = ""
    world_size: Annotated[int, pydantic.Field(ge=1)]
    pool: tuple[PoolEntry, ...]
    home: str
    model: ModelInfo
    data: DataInfo | None = None
    machine: MachineInfo = pydantic.Field(default_factory=MachineInfo.here)
    versions: dict[str, str] = {}
    seed: int | None = None
    sessions: tuple[SessionInfo, ...] = ()  # earlier starts, oldest first

    def after(self, earlier: RunInfo) -> RunInfo:
        """This start of a run that ``earlier`` began: keeps the history."""
        session = SessionInfo(
            started_at=earlier.started_at, world_size=earlier.world_size, pool=earlier.pool, versions=earlier.versions
        )
        return self.model_copy(update={"sessions": (*earlier.sessions, session)})


def installed_versions(
    packages: Iterable[str] = ("hotspa_plugin", "torch", "megatron-core", "deepspeed", "transformer-engine"),
) -> dict[str, str]:
    """Versions of Python and of those packages that are installed; imports none of them."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


class ComparedRun(_Record):
    """One run over the compared batches. ``error`` says why there are no figures, where there are none."""

    label: str  # "hot", or the static strategy as written in a pool
    kind: Literal["hot", "static"]
    tokens_per_s: Annotated[float, pydantic.Field(ge=0)] | None = None
    step_s: tuple[Seconds, ...] = ()  # per step, in order, the same batches in every run; warm-up left out
    loss: float | None = None  # of the last step
    losses: tuple[float, ...] = ()  # per step, in order
    peak_memory_bytes: Count | None = None
    error: str | None = None


class Comparison(_Record):
    """The same batches under hot switching and under each static strategy."""

    runs: tuple[ComparedRun, ...]
    num_steps: Count
    num_tokens: Count
    loss_tolerance: Annotated[float, pydantic.Field(ge=0)] = 1e-4  # relative; larger differences are said

    @pydantic.model_validator(mode="after")
    def _check(self) -> Comparison:
        if sum(run.kind == "hot" for run in self.runs) != 1:
            raise ValueError("a comparison holds exactly one run of kind 'hot'")
        return self

    @property
    def hot(self) -> ComparedRun:
        return next(run for run in self.runs if run.kind == "hot")

    @property
    def static(self) -> tuple[ComparedRun, ...]:
        return tuple(run for run in self.runs if run.kind == "static")


def write_json(path: Path, record: pydantic.BaseModel) -> None:
    """Writes a record whole or not at all: a reader never sees half a file."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)
