"""``hotspa plan``: the pool, its bounds and home with the least expected step time, or the advice to stay static."""

from __future__ import annotations

import time
from pathlib import Path

import click

from hotspa_plugin.cli import planning_options as shared


@click.command()
@click.option(
    "--model", "model_name", required=True, metavar="NAME|FILE", help="llama-7b, a preset, or a configuration."
)
@click.option("--gpus", "num_ranks", type=click.IntRange(min=1), required=True, metavar="N", help="Ranks to plan for.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="[default: the profile's]")
@click.option(
    "--lengths",
    default="wikipedia",
    show_default=True,
    metavar="SPEC|FILE",
    help="wikipedia, uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA, a file of lengths, or a JSON histogram.",
)
@click.option("--context", type=click.IntRange(min=1), metavar="TOKENS", help="Cut longer sequences to this.")
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="N",
    help="Sequences of a global batch.",
)
@click.option(
    "--profile",
    "profile_path",
    metavar="FILE",
    help=f"What hotspa profile wrote; {shared.PUBLISHED} for the published figures.",
)
@shared.memory_limit_option
@shared.slab_gradients_option
@shared.recompute_option
@shared.json_option
def plan(
    model_name: str,
    num_ranks: int,
    gpus_per_node: int | None,
    lengths: str,
    context: int | None,
    global_batch: int,
    profile_path: str | None,
    memory_limit_gb: float | None,
    slab_gradients: str,
    recompute: bool,
    json_path: Path | None,
) -> None:
    """Find the pool for a model, a cluster and its lengths.

    Searches strategies, bounds and home for the least expected step time under the memory limit, prices the
    result with this package's own switch plans, and compares it with the best static strategy, packed and
    balanced alike. Says when static is the better choice.

    \b
    hotspa plan --model llama-32b --gpus 32 --context 32768
    hotspa plan --model config.yaml --gpus 4 --lengths lengths.txt --profile profile.json
    """
    shared.check_output(json_path)
    from hotspa_plugin.cli.plan_tables import plan_json, print_plan
    from hotspa_plugin.search import LengthSource, StepModel, make_plan

    started_s = time.perf_counter()
    source = LengthSource.open(lengths, max_tokens=context)
    model = shared.resolve_model(model_name, num_ranks=num_ranks, max_positions=context or 1)
    profile = shared.resolve_profile(profile_path, model)
    step_model = StepModel(
        profile,
        num_ranks=num_ranks,
        ranks_per_node=gpus_per_node,
        memory_limit_bytes=shared.memory_limit_bytes(memory_limit_gb),
        slab_gradients=slab_gradients,
    )
    click.echo(
        f"{model.name} on {num_ranks} ranks, {global_batch} sequences a batch from {source.name}"
        + (f" cut at {context:,} tokens" if context else "")
        + f"; figures of {profile.machine.name}"
    )
    found = make_plan(
        step_model, lambda seed: source.draw(global_batch, seed=seed), recompute=shared.recompute_modes(recompute)
    )
    print_plan(found, step_model)
    elapsed_s = time.perf_counter() - started_s
    if json_path is not None:
        settings = {
            "model": model.name,
            "num_ranks": num_ranks,
            "ranks_per_node": step_model.communication.cluster.ranks_per_node,
            "lengths": source.name,
            "context_tokens": context,
            "global_batch_sequences": global_batch,
            "profile": profile.source,
            "memory_limit_bytes": step_model.memory.limit_bytes,
            "slab_gradients": slab_gradients,
            "recompute": recompute,
            "elapsed_s": elapsed_s,
        }
        shared.write_json(json_path, plan_json(found, step_model, settings))
    click.echo(f"({elapsed_s:.1f} s)", err=True)
