"""Reading a run's records back, with errors that name file, line and way out."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TypeVar

import pydantic

from hotspa_plugin.runtime.run_record import (
    COMPARISON_FILE,
    FORMAT_VERSION,
    RUN_FILE,
    STEPS_FILE,
    Comparison,
    RunInfo,
    StepRecord,
)
from hotspa_plugin.runtime.trace import RankSpans, first_error, read_part_lines, read_spans

_Model = TypeVar("_Model", bound=pydantic.BaseModel)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run as recorded. ``steps`` ascend without repeats; ``notes`` say what reading had to leave out."""

    directory: Path
    info: RunInfo
    steps: tuple[StepRecord, ...] = ()
    ranks: tuple[RankSpans, ...] = ()
    comparison: Comparison | None = None
    notes: tuple[str, ...] = ()

    @property
    def traced_steps(self) -> tuple[int, ...]:
        """Steps of which at least one rank kept spans."""
        return tuple(sorted({step for r in self.ranks for step, spans in r.steps.items() if spans}))


def read_run(directory: str | os.PathLike[str]) -> Run:
    """Reads and checks the records of a finished, running or crashed run.

    Raises ValueError, on one line, where the folder is missing, holds no run, or holds a damaged record.
    A last line that a crash left unfinished is left out and noted. Where a resumed run went over a step
    again, the later record counts.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"no folder {directory}; give the output folder of a run")
    if not (directory / RUN_FILE).exists():
        raise ValueError(f"folder {directory} holds no run (no {RUN_FILE}); give the output folder of a run")
    info = _read_json(directory / RUN_FILE, RunInfo)
    if info.format_version > FORMAT_VERSION:
        raise ValueError(
            f"{directory / RUN_FILE} has format {info.format_version}, this version reads up to {FORMAT_VERSION}; "
            "upgrade hotspa_plugin"
        )
    notes: list[str] = []
    steps = _read_steps(directory / STEPS_FILE, notes)
    comparison = None
    if (directory / COMPARISON_FILE).exists():
        comparison = _read_json(directory / COMPARISON_FILE, Comparison)
    return Run(
        directory=directory,
        info=info,
        steps=steps,
        ranks=read_spans(directory),
        comparison=comparison,
        notes=tuple(notes),
    )


def _read_json(path: Path, model: type[_Model]) -> _Model:
    try:
        return model.model_validate_json(path.read_bytes())
    except pydantic.ValidationError as error:
        raise ValueError(f"{path} is damaged ({first_error(error)})") from None


def _read_steps(path: Path, notes: list[str]) -> tuple[StepRecord, ...]:
    steps: dict[int, StepRecord] = {}
    num_repeated = 0
    if not path.exists():
        return ()
    for number, line in read_part_lines(path):
        try:
            record = StepRecord.model_validate_json(line)
        except pydantic.ValidationError as error:
            raise ValueError(
                f"{path}, line {number}: damaged ({first_error(error)}); remove that line to read the rest"
            ) from None
        num_repeated += record.step in steps
        steps[record.step] = record
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                notes.append(f"The last line of {STEPS_FILE} is unfinished and was left out.")
    if num_repeated:
        notes.append(f"{num_repeated} steps were run again after a resume; the later record of each counts.")
    return tuple(steps[step] for step in sorted(steps))
