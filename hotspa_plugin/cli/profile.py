"""``hotspa profile``: measures a model on this machine for ``hotspa plan``.

Calls ``profile_rank(request)`` on every rank.
"""

from __future__ import annotations

from pathlib import Path

import click

from hotspa_plugin.cli import options
from hotspa_plugin.cli import planning_options as shared

PROFILE_RANK = "hotspa_plugin.integrations.megatron.profiling:profile_rank"
SHORTEST_TOKENS = 128
WANTED_ERROR = 0.1  # of the fits on unseen lengths


@click.command()
@click.option("--model", "model_name", required=True, metavar="NAME|FILE", help="A preset or a configuration file.")
@options.ranks_option
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True, help="The profile to write."
)
@click.option("--longest", type=click.IntRange(min=256), default=4096, show_default=True, metavar="TOKENS",
              help="Longest sequence to measure.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
              help="Measurements of each length, of which the fastest counts.")  # fmt: skip
@click.option("--strategies", metavar="SPEC,...", help="Only these.  [default: all that fit model and ranks]")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="[default: the configuration's, else fp32]")
@click.option("--distributed-optimizer", is_flag=True, help="Shard optimizer state over data parallel.")
@shared.recompute_option
@options.device_option
@options.timeout_option
def profile(
    model_name: str,
    num_ranks: int,
    out: Path,
    longest: int,
    repeats: int,
    strategies: str | None,
    dtype: str | None,
    distributed_optimizer: bool,
    recompute: bool,
    device: str,
    timeout_s: float,
) -> None:
    """Measure a model on this machine, for hotspa plan.

    Times micro-batches of several lengths under every strategy, their memory, the optimizer, and the links
    between ranks; fits them, and reports how far the fits are off on lengths that they did not see.
    """
    shared.check_output(out, "--out")
    options.refuse_torchrun("profile")
    model, config_dtype = shared.read_model_config(model_name)
    sizes = shared.model_sizes(model, num_ranks=num_ranks, max_positions=longest, dtype=dtype or config_dtype)
    chosen = _strategies(strategies, sizes.shape(), num_ranks, shared.recompute_modes(recompute))
    fitted, unseen = measured_lengths(longest)
    profile_rank = options.entry_function(PROFILE_RANK)
    from hotspa_plugin.cost import Profile
    from hotspa_plugin.integrations.megatron.profiling import ProfileRequest
    from hotspa_plugin.runtime.worker_pool import WorkerPool

    request = ProfileRequest(
        model=model,
        sizes=sizes,
        strategies=chosen,
        fitted_lengths=fitted,
        unseen_lengths=unseen,
        num_repeats=repeats,
        distributed_optimizer=distributed_optimizer,
    )
    options.warn_of_memory(num_ranks)
    with WorkerPool(num_ranks, device=device, collective_timeout_s=timeout_s, call_timeout_s=None) as workers:
        found = Profile.model_validate(workers.run(profile_rank, request=request)[0])
    shared.write_text(out, found.to_json())
    _print(found)
    click.echo(out)


def measured_lengths(longest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(lengths to fit, lengths to try the fit on), in multiples of 16 tokens from about ``SHORTEST_TOKENS`` up."""
    shortest = min(SHORTEST_TOKENS, longest // 4)
    points = [round(shortest * (longest / shortest) ** (i / 6) / 16) * 16 or 16 for i in range(7)]
    return tuple(sorted({*points[::2], longest})), tuple(sorted({*points[1::2]} - {*points[::2], longest}))


def _strategies(given, shape, num_ranks, recompute):
    import dataclasses

    from hotspa_plugin.strategy import ParallelStrategy
    from hotspa_plugin.strategy.checks import check_model
    from hotspa_plugin.strategy.parallel_strategy import divisors

    if given is not None:
        named = [ParallelStrategy.parse(spec).resolve(num_ranks) for spec in given.replace(",", " ").split()]
        for strategy in named:
            check_model(strategy, shape)
        return tuple(named)
    found = []
    for tp in divisors(num_ranks):
        for pp in divisors(num_ranks // tp):
            strategy = ParallelStrategy(tp=tp, pp=pp).resolve(num_ranks)
            try:
                check_model(strategy, shape)
            except ValueError:
                continue
            found += [dataclasses.replace(strategy, recompute=mode) for mode in recompute]
    return tuple(found)


def _print(found) -> None:
    from hotspa_plugin.cli.plan_tables import print_table

    lengths = (512, 2048)
    rows = [
        [str(s.strategy), *(f"{s.cost.packed_s([n]) * 1e3:.1f}" for n in lengths),
         f"{s.activation_bytes_per_token / 1e3:.1f}", f"{s.time_error:.1%}", f"{s.memory_error:.1%}"]
        for s in found.stages
    ]  # fmt: skip
    columns = ("strategy", *(f"ms at {n}" for n in lengths), "kB a token", "time off by", "memory off by")
    print_table("micro-batch on a stage, and errors on unseen lengths (median, largest)", columns, rows)
    bad = [s for s in found.stages if max(s.time_error, s.memory_error) > WANTED_ERROR]
    if bad:
        names = ", ".join(str(s.strategy) for s in bad)
        click.echo(f"note: fits are off by more than {WANTED_ERROR:.0%} for {names}; a quieter machine or more --repeats help",
                   err=True)  # fmt: skip
