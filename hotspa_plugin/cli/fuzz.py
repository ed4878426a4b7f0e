"""``hotspa fuzz``: random cases, each of which must verify or be refused at start with a clear message."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotspa_plugin.cli import options
from hotspa_plugin.runtime.rank_failure import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from hotspa_plugin.fuzz.campaign import Failure
    from hotspa_plugin.fuzz.outcome import Outcome

FORMAT = "hotspa fuzz"
KINDS = {"switches": ("switch",), "steps": ("step",), "both": ("switch", "step")}


class RankRange(click.ParamType):
    """``2..8``, or one number."""

    name = "ranks"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", value)
        fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= fewest <= most:
            raise ValueError(f"--ranks {value!r}: write the fewest and the most ranks, such as 2..8")
        return fewest, most


@click.command()
@click.option(
    "--cases", "num_cases", type=click.IntRange(min=1), default=90, show_default="90", metavar="N", help="How many."
)
@options.seed_option
@click.option(
    "--ranks",
    "rank_range",
    type=RankRange(),
    default="2..8",
    show_default=True,
    metavar="2..8",
    help="Fewest and most ranks; switches, which need no processes, go up to twice as many.",
)
@click.option(
    "--kind",
    type=click.Choice(list(KINDS)),
    default="both",
    show_default=True,
    help="Switches and flushes in one process, whole steps over gloo, or both (one case in nine a step).",
)
@click.option("--replay", metavar="JSON", help="Run one case as a failure printed it.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=120.0,
    show_default="120",
    metavar="SECONDS",
    help="What takes longer counts as a hang.",
)
@click.option(
    "--shrink",
    "shrink_s",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default="120",
    metavar="SECONDS",
    help="How long to look for a smaller case that fails the same way.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the result there.")
@click.option("--force", is_flag=True, help="Let --json write over a file that is not a result of hotspa fuzz.")
def fuzz(
    num_cases: int,
    seed: int,
    rank_range: tuple[int, int],
    kind: str,
    replay: str | None,
    timeout_s: float,
    shrink_s: float,
    json_path: Path | None,
    force: bool,
) -> int:
    """Random models, pools, batches and settings.

    Each must give the exact gradient and bit-identical parameters with every sample trained once, or be
    refused at start with one clear line. Everything else is a defect: it is made small, and the command that
    replays it is printed. Exit code 1 where there was one.
    """
    from hotspa_plugin.cli.verify_result import check_json_path, write_json

    options.refuse_torchrun("fuzz")
    if json_path is not None:
        check_json_path(json_path, force=force, format=FORMAT)
    options.require_packages()
    from hotspa_plugin.fuzz.campaign import Campaign, draw_cases, summary

    cases = [_read_case(replay)] if replay else draw_cases(num_cases, seed, rank_range, KINDS[kind])
    num_ranks = max((case.num_ranks for case in cases if case.kind == "step"), default=0)
    if num_ranks:
        options.warn_of_memory(num_ranks + 1)
    started_s = time.monotonic()
    with _Progress(len(cases)) as progress:
        campaign = Campaign(
            cases=cases,
            timeout_s=timeout_s,
            shrink_s=shrink_s,
            on_outcome=progress.update,
            env=options.quiet_environment(),
        )
        try:
            campaign.run()
            is_whole = True
        except KeyboardInterrupt:  # what was found so far counts
            is_whole = False
    failures = campaign.failures
    result = summary(campaign.outcomes, failures, time.monotonic() - started_s)
    if json_path is not None:
        write_json(json_path, result, {"seed": seed, "ranks": list(rank_range), "kind": kind}, format=FORMAT)
    _print_result(result, failures)
    if not is_whole:
        click.echo(f"interrupted after {len(campaign.outcomes)} of {len(cases)} cases", err=True)
    return 1 if failures else 0 if is_whole else EXIT_INTERRUPTED


def _read_case(text: str):
    import pydantic

    from hotspa_plugin.fuzz.case import FuzzCase

    try:
        return FuzzCase.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "text"
        raise ValueError(f"--replay: {where}: {first['msg']}; give the JSON as a failure printed it") from None


class _Progress:
    """A line that counts on a terminal, else a line now and then; every defect at once."""

    def __init__(self, num_cases: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("cases", total=num_cases)
        self._num_cases, self._num_done, self._num_defects = num_cases, 0, 0

    def __enter__(self) -> _Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, outcome: Outcome) -> None:
        self._num_done += 1
        if outcome.is_defect:
            self._num_defects += 1
            click.echo(f"{outcome.status.value}: {_first_line(outcome.detail)}; looking for a smaller case", err=True)
        self._bar.update(self._task, completed=self._num_done, description=f"cases, {self._num_defects} failed")
        if not self._console.is_terminal and (self._num_done % 50 == 0 or self._num_done == self._num_cases):
            click.echo(f"{self._num_done} of {self._num_cases} cases, {self._num_defects} failed", err=True)


def _print_result(result: dict[str, Any], failures: list[Failure]) -> None:
    names = {"switch": "switches and flushes in one process", "step": "whole steps over gloo"}
    for kind, counts in result["outcomes"].items():
        if counts:
            told = ", ".join(f"{count} {status}" for status, count in counts.items())
            click.echo(f"{names[kind]}: {told}")
    for failure in failures:
        smallest = failure.smallest
        click.echo(f"{smallest.status.value}:", err=True)
        for line in smallest.detail.splitlines():
            click.echo(f"    {line}", err=True)
        click.echo(f"  replay with: {smallest.case.replay_command}", err=True)
    verdict = f"{len(failures)} of {result['num_cases']} cases FAILED" if failures else "no case failed"
    click.echo(f"{verdict} ({result['seconds']:.0f} s)")


def _first_line(text: str) -> str:
    return json.dumps((text.splitlines() or [""])[0])[1:-1]
