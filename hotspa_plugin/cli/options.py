"""Options and checks that several commands share."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotspa_plugin.strategy import StrategyPool

# Functions behind the commands, as "module:function"; those of an engine by its package's name.
ENGINES = ("megatron", "deepspeed")
RUN_DEMO = "hotspa_plugin.integrations.{engine}.demo:run_demo"
PLAN_TRAINING = "hotspa_plugin.integrations.megatron.training_plan:plan_training"
OPEN_TRAINING_DATA = "hotspa_plugin.integrations.megatron.training_plan:open_training_data"
TRAIN_RANK = "hotspa_plugin.integrations.megatron.training_run:train_rank"
VERIFY_CASE = "hotspa_plugin.integrations.{engine}.verify:verify_case"
WRITE_REPORT = "hotspa_plugin.report:write_report"

RANK_MEMORY_BYTES = 500_000_000  # what torch and Megatron take in a rank before any model

ranks_option = click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=1),
    default=4,
    show_default="4",
    metavar="N",
    help="Local ranks to start.",
)
engine_option = click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default="megatron",
    show_default=True,
    help="Whose optimizer and engine train the model.",
)
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=1234, show_default="1234", metavar="N", help="Random seed."
)
device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: CUDA where every rank gets a GPU.",
)
timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default="600",
    metavar="SECONDS",
    help="How long a rank waits for the others.",
)


class Lengths(click.ParamType):
    """Sequence lengths in tokens, parted by commas or spaces."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        return value if isinstance(value, tuple) else parse_lengths(value, "--lengths")


def parse_lengths(text: str, source: str) -> tuple[int, ...]:
    """Lengths of at least one token each; ValueError naming ``source`` and the wrong entry."""
    lengths = []
    for line_number, line in enumerate(text.splitlines(), start=1):
        for entry in re.split(r"[\s,]+", line.partition("#")[0].strip()):
            if not entry:
                continue
            if not re.fullmatch(r"\d+", entry) or int(entry) < 1:
                where = f" (line {line_number})" if "\n" in text else ""
                raise ValueError(
                    f"{source}: {entry!r}{where} is no sequence length; write whole numbers from 1 up: 7,129,1,64"
                )
            lengths.append(int(entry))
    if not lengths:
        raise ValueError(f"{source}: there is no length in it; write whole numbers from 1 up: 7,129,1,64")
    return tuple(lengths)


def read_lengths_file(path: Path) -> tuple[int, ...]:
    """Lengths out of a text file, ``#`` starting a comment."""
    try:
        return parse_lengths(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--lengths-file {path}: cannot be read ({error})") from None


def parse_pool(spec: str, home: str | None = None, sequence_parallel: bool = True) -> StrategyPool:
    """The pool of ``--pool`` and ``--home``; without ``sequence_parallel`` it is off in every strategy."""
    import dataclasses

    from hotspa_plugin.strategy import ParallelStrategy, StrategyPool

    if sequence_parallel:
        return StrategyPool.parse(spec, home=home)
    pool = StrategyPool.parse(spec)
    entries = tuple(
        dataclasses.replace(entry, strategy=dataclasses.replace(entry.strategy, sp=False)) for entry in pool.entries
    )
    parsed_home = None if home is None else dataclasses.replace(ParallelStrategy.parse(home), sp=False)
    return StrategyPool(entries=entries, home=parsed_home)


def entry_function(target: str | Callable[..., Any], engine: str = "megatron") -> Callable[..., Any]:
    """The function behind a command, imported now; ValueError naming the package where one is missing."""
    require_packages(engine)
    if isinstance(target, str):
        target = target.format(engine=engine)
    from hotspa_plugin.runtime.rank_process import resolve_target

    return resolve_target(target)


def require_packages(engine: str = "megatron") -> None:
    """Raises ValueError where a package that ``engine`` needs is not installed; imports none."""
    needed = [("torch", "torch", "megatron"), ("megatron.core", "megatron-core", "megatron")]
    if engine == "deepspeed":
        needed += [("deepspeed", "deepspeed", "deepspeed"), ("transformers", "transformers", "deepspeed")]
    for module, package, extra in needed:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ValueError(f"{package} is not installed: pip install 'hotspa-plugin[{extra}]', then hotspa doctor")


def quiet_environment() -> dict[str, str]:
    """Environment of ranks in which packages keep their advice to developers to themselves, unless it is wanted."""
    return {} if "PYTHONWARNINGS" in os.environ else {"PYTHONWARNINGS": "ignore"}


def command_line() -> str:
    """The command as it was typed, for a run's records."""
    return shlex.join(["hotspa", *click.get_current_context().find_root().obj])


def refuse_torchrun(command: str) -> None:
    """Raises ValueError for a command that starts its ranks itself but was started as a rank."""
    from hotspa_plugin.runtime.launch import in_torchrun

    if in_torchrun():
        raise ValueError(
            f"hotspa {command} starts its ranks itself: run it without torchrun "
            "(or unset RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT)"
        )


def warn_of_memory(num_ranks: int) -> None:
    """Says so where the ranks alone may take more memory than there is."""
    available_bytes = available_memory_bytes()
    if available_bytes is not None and num_ranks * RANK_MEMORY_BYTES > available_bytes:
        click.echo(
            f"note: {num_ranks} ranks take about {num_ranks * RANK_MEMORY_BYTES / 1e9:.1f} GB before any model, "
            f"{available_bytes / 1e9:.1f} GB are free; fewer ranks may be needed",
            err=True,
        )


def available_memory_bytes() -> int | None:
    """Memory that processes can still get on this machine; None where it does not tell."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def free_folder(path: Path) -> Path:
    """``path`` where nothing is there yet, else the first of ``path-2``, ``path-3``, ... that is free."""
    candidate, number = path, 2
    while candidate.exists() and (not candidate.is_dir() or any(os.scandir(candidate))):
        candidate, number = path.with_name(f"{path.name}-{number}"), number + 1
    return candidate
