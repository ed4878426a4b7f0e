"""``hotspa demo``.

Calls ``run_demo(config, *, num_ranks, include_all_static, command)`` in this process, which starts the ranks itself.
"""

from __future__ import annotations

from pathlib import Path

import click

from hotspa_plugin.cli import options

DEFAULT_OUT = Path("runs/demo")
VOCAB_SIZE = 256  # bytes


@click.command()
@options.ranks_option
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    default=8,
    show_default="8",
    metavar="N",
    help="Optimizer steps.",
)
@click.option(
    "--pool",
    "pool_spec",
    metavar="SPEC",
    help="Strategies with length bounds.  [default: tp1:512 tp2:1024 tp2pp2:4096]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help=f"Folder for the records.  [default: {DEFAULT_OUT}, or the next free {DEFAULT_OUT}-2, ...]",
)
@click.option("--all-static", is_flag=True, help="Compare with static strategies over their bound as well.")
@options.engine_option
@options.seed_option
@options.device_option
@options.timeout_option
def demo(
    num_ranks: int,
    num_steps: int,
    pool_spec: str | None,
    out: Path | None,
    all_static: bool,
    engine: str,
    seed: int,
    device: str,
    timeout_s: float,
) -> None:
    """Train a tiny model and compare with static strategies.

    Trains tiny-llama on Python's own standard library, switching strategies inside every step, then runs
    the same batches under each static strategy that can hold the longest sequence, and prints tokens per
    second side by side and whether the losses agree. Whatever comes out is printed, also when static wins.
    """
    from hotspa_plugin.config import DEFAULT_POOL, TrainingConfig
    from hotspa_plugin.runtime.recorder import check_run_directory

    options.refuse_torchrun("demo")
    pool = options.parse_pool(pool_spec or DEFAULT_POOL)
    folder = check_run_directory(out) if out is not None else options.free_folder(DEFAULT_OUT)
    config = TrainingConfig.model_validate(
        {
            "pool": str(pool),
            "run": {
                "steps": num_steps,
                "out": str(folder),
                "seed": seed,
                "device": device,
                "timeout_s": timeout_s,
            },
        }
    )
    config.model.check_pool(pool, num_ranks=num_ranks, vocab_size=VOCAB_SIZE)
    run_demo = options.entry_function(options.RUN_DEMO, engine)
    options.warn_of_memory(num_ranks)
    run_demo(config, num_ranks=num_ranks, include_all_static=all_static, command=options.command_line())
