"""``hotspa profile``: measures a model on this machine for ``hotspa plan``.

Calls ``profile_rank(request)`` on every rank.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from hotspa_plugin.cli import options
from hotspa_plugin.cli import planning_options as shared

PROFILE_LAUNCHED = "hotspa_plugin.integrations.megatron.profiling:profile_launched"
PROFILE_RANK = "hotspa_plugin.integrations.megatron.profiling:profile_rank"
WANTED_ERROR = 0.1  # of the fits on unseen lengths


@click.command()
@click.option("--model", "model_name", required=True, metavar="NAME|FILE", help="A preset or a configuration file.")
@options.ranks_option
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("profile.json"), show_default=True, help="File to write."
)
@click.option("--longest", type=click.IntRange(min=256), default=4096, show_default=True, metavar="TOKENS",
              help="Longest sequence to measure.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, metavar="N",
              help="Measurements of each length, of which the fastest counts; "
              "fewer of those that take seconds.")  # fmt: skip
@click.option("--strategies", metavar="SPEC,...", help="Only these.  [default: all that fit model and ranks]")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="[default: the configuration's, else fp32]")
@click.option("--distributed-optimizer", is_flag=True, help="Shard optimizer state over data parallel.")
@shared.recompute_option
@shared.nodes_option
@shared.link_option
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
    num_nodes: int,
    link_mbit: float | None,
    device: str,
    timeout_s: float,
) -> None:
    """Measure a model on this machine, for hotspa plan.

    Times micro-batches of several lengths under every strategy, their memory, the optimizer, and the links
    between ranks; fits them, and reports how far the fits are off on lengths that they did not see.

    \b
    hotspa profile --model config.yaml --ranks 4
    torchrun --nproc-per-node 8 -m hotspa_plugin profile --model config.yaml
    """
    from hotspa_plugin.config.sizes import model_sizes
    from hotspa_plugin.cost.fitting import measured_lengths
    from hotspa_plugin.runtime.launch import in_torchrun, launch

    shared.check_output(out, "--out")
    torchrun = in_torchrun()
    if torchrun:
        num_ranks = int(os.environ["WORLD_SIZE"])
        if num_nodes > 1:
            raise ValueError("--nodes is for ranks that this command starts itself: leave it out under torchrun")
    link = shared.checked_link(num_nodes, link_mbit, num_ranks)
    model, config_dtype = shared.read_model_config(model_name)
    sizes = model_sizes(model, num_ranks=num_ranks, max_positions=longest, dtype=dtype or config_dtype)
    chosen = _strategies(strategies, sizes.shape(), num_ranks, shared.recompute_modes(recompute))
    fitted, unseen = measured_lengths(longest)
    profile_rank = options.entry_function(PROFILE_RANK)
    from hotspa_plugin.cost import Profile
    from hotspa_plugin.integrations.megatron.profiling import ProfileRequest
    from hotspa_plugin.runtime.node_network import rank_networks
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
    if torchrun:
        (content,) = launch(PROFILE_LAUNCHED, num_ranks, (request,), timeout_s=timeout_s, device=device)
        if os.environ["RANK"] == "0":
            _finish(Profile.model_validate(content), out)
        return
    options.warn_of_memory(num_ranks)
    with (
        rank_networks(num_ranks, link) as networks,
        WorkerPool(
            num_ranks, device=device, collective_timeout_s=timeout_s, call_timeout_s=None, networks=networks,
            env={"LOCAL_WORLD_SIZE": str(num_ranks // num_nodes)},
        ) as workers,
    ):  # fmt: skip
        found = Profile.model_validate(workers.run(profile_rank, request=request)[0])
    _finish(found, out)


def _finish(found, out: Path) -> None:
    shared.write_text(out, found.to_json())
    _print(found)
    click.echo(out)


def _strategies(given, shape, num_ranks, recompute):
    from hotspa_plugin.search import possible_strategies
    from hotspa_plugin.strategy import ParallelStrategy
    from hotspa_plugin.strategy.checks import check_model

    if given is None:
        return tuple(possible_strategies(shape, num_ranks, recompute=recompute))
    named = [ParallelStrategy.parse(spec).resolve(num_ranks) for spec in given.replace(",", " ").split()]
    for strategy in named:
        check_model(strategy, shape)
    return tuple(named)


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
        click.echo(
            f"note: fits are off by more than {WANTED_ERROR:.0%} for {names}; a quieter machine or more --repeats help",
            err=True,
        )
