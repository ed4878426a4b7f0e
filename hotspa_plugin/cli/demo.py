"""``hotspa demo``.

Calls ``RUN_DEMO`` in this process, which starts the ranks itself:
``run_demo(*, num_ranks: int, num_steps: int, pool: StrategyPool, out: Path, seed: int, device: str,
timeout_s: float) -> None``. The pool is checked against the ranks and the model ``tiny-llama``, its dp resolved;
``out`` holds no run and may not exist yet.
"""

from __future__ import annotations

from pathlib import Path

import click

from hotspa_plugin.cli import options

DEFAULT_OUT = Path("runs/demo")
VOCAB_SIZE = 257  # bytes, and one that ends a document


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
@options.seed_option
@options.device_option
@options.timeout_option
def demo(
    num_ranks: int,
    num_steps: int,
    pool_spec: str | None,
    out: Path | None,
    seed: int,
    device: str,
    timeout_s: float,
) -> None:
    """Train a tiny model and compare with static strategies.

    Trains tiny-llama on Python's own standard library, switching strategies inside every step, then runs
    the same batches under each static strategy that can hold the longest sequence, and prints tokens per
    second side by side and whether the losses agree. Whatever comes out is printed, also when static wins.
    """
    from hotspa_plugin.config import DEFAULT_POOL, ModelConfig
    from hotspa_plugin.runtime.recorder import check_run_directory

    options.refuse_torchrun("demo")
    pool = options.parse_pool(pool_spec or DEFAULT_POOL)
    model = ModelConfig.model_validate({"preset": "tiny-llama"})
    pool = model.check_pool(pool, num_ranks=num_ranks, vocab_size=VOCAB_SIZE)
    folder = check_run_directory(out) if out is not None else options.free_folder(DEFAULT_OUT)
    run_demo = options.entry_function(options.RUN_DEMO)
    options.warn_of_memory(num_ranks)
    run_demo(
        num_ranks=num_ranks,
        num_steps=num_steps,
        pool=pool,
        out=folder,
        seed=seed,
        device=device,
        timeout_s=timeout_s,
    )
