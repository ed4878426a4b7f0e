"""``hotspa train``.

Launches ``train_rank(rank, world_size, config, command)`` on every rank, or calls it in this one under torchrun. What
can be checked cheaply is checked before any rank is started.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotspa_plugin.cli import options

if TYPE_CHECKING:
    from hotspa_plugin.config import TrainingConfig


@click.command()
@click.argument("config_path", metavar="CONFIG.yaml", required=False, type=click.Path(path_type=Path))
@click.option(
    "--ranks",
    "num_ranks",
    type=click.IntRange(min=1),
    metavar="N",
    help="Local ranks to start; left out under torchrun.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="In place of run.steps.")
@click.option("--out", metavar="DIR", help="In place of run.out.")
@click.option("--resume", is_flag=True, help="Continue the run in run.out from its last checkpoint.")
@click.option("--check", is_flag=True, help="Only check the configuration and print it.")
@click.option("--print-config", is_flag=True, help="Print the default configuration with comments, to start from.")
def train(
    config_path: Path | None,
    num_ranks: int | None,
    steps: int | None,
    out: str | None,
    resume: bool,
    check: bool,
    print_config: bool,
) -> None:
    """Train your own sizes, data and pool.

    \b
    hotspa train --print-config > config.yaml
    hotspa train config.yaml --ranks 4
    torchrun --nproc-per-node 8 -m hotspa_plugin train config.yaml
    """
    from hotspa_plugin.config import default_config_text, read_config
    from hotspa_plugin.runtime.launch import in_torchrun, launch
    from hotspa_plugin.runtime.recorder import check_run_directory

    if print_config:
        click.echo(default_config_text(), nl=False)
        return
    if config_path is None:
        raise click.UsageError("CONFIG.yaml is missing; hotspa train --print-config > config.yaml writes one")
    overrides: dict[str, object] = {}
    if steps is not None:
        overrides["run.steps"] = steps
    if out is not None:
        overrides["run.out"] = out
    if resume:
        overrides["run.resume"] = True
    config = read_config(config_path, overrides)
    config.data.check_paths()
    world_size = _world_size(num_ranks, in_torchrun(), optional=check)
    if world_size is not None and not config.is_auto:
        config.model.check_pool(config.strategy_pool, num_ranks=world_size, vocab_size=_known_vocab_size(config))
    if check:
        _print_checked(config)
        return
    command = options.command_line()
    # Ranks that were started outside check for themselves; one may have begun to write when another gets here.
    if not in_torchrun():
        check_run_directory(config.run.out, resume=config.run.resume)
        options.warn_of_memory(world_size)
        # Lengths in bytes are cheap to get, and starting ranks is not: mistakes in the data come out first.
        if config.data.tokenizer == "bytes":
            if config.is_auto:
                options.entry_function(options.OPEN_TRAINING_DATA)(config, num_ranks=world_size)
            else:
                options.entry_function(options.PLAN_TRAINING)(config, num_ranks=world_size, command=command)
    launch(
        options.entry_function(options.TRAIN_RANK),
        num_ranks,
        (config, command),
        timeout_s=config.run.timeout_s,
        device=config.run.device,
        env=options.quiet_environment(),
    )


def _world_size(num_ranks: int | None, under_torchrun: bool, optional: bool) -> int | None:
    if under_torchrun:
        world_size = int(os.environ["WORLD_SIZE"])
        if num_ranks not in (None, world_size):
            raise ValueError(f"--ranks {num_ranks}, but torchrun started {world_size}: leave --ranks out")
        return world_size
    if num_ranks is None and not optional:
        raise ValueError("the number of ranks is missing: give --ranks N, or start the command under torchrun")
    return num_ranks


def _known_vocab_size(config: TrainingConfig) -> int:
    if config.data.tokenizer != "bytes" or config.data.source == "megatron":
        return 1  # known once the tokenizer or the data has been read
    return 257 if config.data.end_of_document else 256


def _print_checked(config: TrainingConfig) -> None:
    import yaml

    click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)
