"""``hotspa verify``.

Starts the ranks and a one-process reference, and calls ``verify_case(workers, case)`` in this process; that decides
what is beyond bounds.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotspa_plugin.cli import options

if TYPE_CHECKING:
    from hotspa_plugin.config import ModelConfig
    from hotspa_plugin.strategy import StrategyPool

DEFAULT_VOCAB_SIZE = 256
DEFAULT_PRESET = "tiny-llama"


@click.command()
@click.option(
    "--pool", "pool_spec", required=True, metavar="SPEC", help='Strategies with length bounds: "tp1:64 tp2pp2:256".'
)
@options.ranks_option
@click.option("--home", metavar="STRATEGY", help="Owner of the optimizer state.  [default: the pool's last]")
@click.option(
    "--model",
    "model_name",
    default=DEFAULT_PRESET,
    show_default=True,
    metavar="NAME",
    help="tiny-llama, tiny-gpt, or a configuration file with a model section; under DeepSpeed also hf-<family>, such "
    "as hf-llama (docs/deepspeed.md lists them).",
)
@options.engine_option
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True, help="Of the parameters."
)
@click.option(
    "--packing",
    type=click.Choice(["packed", "padded"]),
    default="packed",
    show_default=True,
    help="How sequences share a micro-batch.",
)
@click.option("--distributed-optimizer", is_flag=True, help="Shard the optimizer state over data-parallel ranks.")
@click.option("--no-sequence-parallel", is_flag=True, help="Switch sequence parallelism off where tp > 1.")
@click.option(
    "--dropout", type=click.FloatRange(0, 1, max_open=True), metavar="P", help="In place of the model's, 0 up to 1."
)
@click.option("--lengths", type=options.Lengths(), metavar="7,129,1,64", help="Sequences of each step, in tokens.")
@click.option(
    "--lengths-file", type=click.Path(path_type=Path), metavar="FILE", help="The same from a file of numbers."
)
@click.option(
    "--steps",
    "num_steps",
    type=click.IntRange(min=1),
    default=2,
    show_default="2",
    metavar="K",
    help="Optimizer steps.",
)
@options.seed_option
@options.device_option
@options.timeout_option
@click.option("--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Write the result there.")
@click.option("--force", is_flag=True, help="Let --json write over a file that is not a result of hotspa verify.")
def verify(
    pool_spec: str,
    num_ranks: int,
    home: str | None,
    model_name: str,
    engine: str,
    dtype: str,
    packing: str,
    distributed_optimizer: bool,
    no_sequence_parallel: bool,
    dropout: float | None,
    lengths: tuple[int, ...] | None,
    lengths_file: Path | None,
    num_steps: int,
    seed: int,
    device: str,
    timeout_s: float,
    json_path: Path | None,
    force: bool,
) -> int:
    """Does hot switching change my numbers?

    Compares the losses and accumulated gradients of some steps with one process that runs the same
    batches, and the parameters before and after a full round of switches. Exit code 1 beyond 1e-5 in
    fp32, or in bf16 beyond twice the error of home's own static bf16 run.
    """
    from hotspa_plugin.cli import verify_result

    options.refuse_torchrun("verify")
    pool = options.parse_pool(pool_spec, home, sequence_parallel=not no_sequence_parallel)
    hugging_face = engine == "deepspeed" and model_name.startswith("hf-")
    model = _read_model(DEFAULT_PRESET if hugging_face else model_name, dropout)
    if hugging_face:
        # Its own sizes decide what fits; the engine checks them before it trains.
        pool = pool.check(world_size=num_ranks)
    else:
        pool = model.check_pool(pool, num_ranks=num_ranks, vocab_size=model.vocab_size or DEFAULT_VOCAB_SIZE)
    lengths = _choose_lengths(lengths, lengths_file, pool)
    if json_path is not None:
        verify_result.check_json_path(json_path, force=force)
    verify_case = options.entry_function(options.VERIFY_CASE, engine)
    options.warn_of_memory(num_ranks + 1)
    from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase
    from hotspa_plugin.runtime.worker_pool import WorkerPool

    case = VerifyCase(
        pool=str(pool),
        home=str(pool.home),
        model=model_name if hugging_face else model.preset or DEFAULT_PRESET,
        model_changes={} if hugging_face else _changes(model),
        dtype=dtype,
        packing=packing,
        distributed_optimizer=distributed_optimizer,
        lengths=(lengths,) * num_steps,
        vocab_size=model.vocab_size or DEFAULT_VOCAB_SIZE,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        seed=seed,
    )
    click.echo(
        f"{model_name if hugging_face else model.name}, {dtype}, {packing}, {num_ranks} ranks, pool {pool}, "
        f"home {pool.home}; "
        f"{num_steps} {'step' if num_steps == 1 else 'steps'} of {len(lengths)} sequences with {sum(lengths)} tokens"
    )
    started_s = time.monotonic()
    accelerator = {"DS_ACCELERATOR": "cpu"} if engine == "deepspeed" and device == "cpu" else {}
    with WorkerPool(
        num_ranks,
        extra_reference=True,
        device=device,
        env=options.quiet_environment() | accelerator,
        collective_timeout_s=timeout_s,
        call_timeout_s=None,
    ) as workers:
        result = verify_case(workers, case)
    if json_path is not None:
        settings = {"num_ranks": num_ranks, "model_name": model.name, **dataclasses.asdict(case)}
        verify_result.write_json(json_path, result, settings)
    verify_result.print_result(result, dtype, seconds=time.monotonic() - started_s)
    return 0 if result["exact"] else 1


def _changes(model: ModelConfig) -> dict[str, Any]:
    """All of ``model`` but what a verify case says elsewhere, so that the preset it names decides nothing."""
    elsewhere = {"preset", "vocab_size", "make_vocab_size_divisible_by"}
    return model.model_dump(exclude_none=True, exclude=elsewhere)


def _read_model(name: str, dropout: float | None) -> ModelConfig:
    from hotspa_plugin.config import PRESETS, ModelConfig, read_config

    overrides = {} if dropout is None else {"dropout": dropout}
    if name in PRESETS:
        return ModelConfig.model_validate({"preset": name, **overrides})
    if not Path(name).is_file():
        raise ValueError(f"--model {name}: neither a file nor one of {', '.join(PRESETS)}")
    return read_config(name, {f"model.{key}": value for key, value in overrides.items()}).model


def _choose_lengths(lengths: tuple[int, ...] | None, lengths_file: Path | None, pool: StrategyPool) -> tuple[int, ...]:
    if lengths is not None and lengths_file is not None:
        raise ValueError("--lengths and --lengths-file are both given: keep one of them")
    if lengths_file is not None:
        lengths = options.read_lengths_file(lengths_file)
    if lengths is None:
        return default_lengths(pool.bounds_tokens)
    longest = max(lengths)
    if longest > pool.bounds_tokens[-1]:
        raise ValueError(
            f"sequence {lengths.index(longest) + 1} has {longest} tokens, over the pool's last bound "
            f"{pool.bounds_tokens[-1]}: raise the bound or leave the sequence out"
        )
    return lengths


def default_lengths(bounds_tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths for every bucket, its edges and odd ones included, and a sequence of one token, which has no target."""
    lengths, below = [1], 0
    for bound in bounds_tokens:
        width = bound - below
        lengths += [below + 1 + (width - 1) * part // 7 for part in (0, 2, 5)] + [bound]
        below = bound
    return tuple(dict.fromkeys(lengths))
