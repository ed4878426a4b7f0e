"""``hotspa bench train``: hot switching against every static strategy and the stock data path, measured in turn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotspa_plugin.cli import options
from hotspa_plugin.cli import planning_options as shared
from hotspa_plugin.cli.bench_contenders import choose_contenders, choose_rivals

if TYPE_CHECKING:
    from hotspa_plugin.cost import Profile
    from hotspa_plugin.integrations.megatron.bench_train import Contender

BENCH = "hotspa_plugin.integrations.megatron.bench_train:run_workload"


@click.command("train")
@click.option("--model", "model_name", default="tiny-llama", show_default=True, metavar="NAME|FILE")
@options.ranks_option
@click.option("--workload", "workloads", multiple=True, metavar="NAME", default=("wikipedia",), show_default=True,
              help="wikipedia, stdlib, dynamic-context, uniform or one-huge; may be repeated.")  # fmt: skip
@click.option("--profile", "profile_path", required=True, metavar="FILE", help="What hotspa profile wrote here.")
@click.option("--pool", "pool_spec", default="auto", show_default=True, metavar="SPEC",
              help="The hot pool; auto: planned from the profile before anything is measured.")  # fmt: skip
@click.option("--home", help="Home of --pool.  [default: its last strategy]")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, metavar="N",
              help="Batches that are timed, after one that warms up.")  # fmt: skip
@click.option("--batch-tokens", type=click.IntRange(min=1), default=8000, show_default=True, metavar="N")
@click.option("--longest", type=click.IntRange(min=16), default=4096, show_default=True, metavar="TOKENS",
              help="Sequences are cut to this, which is the context of stock.")  # fmt: skip
@shared.memory_limit_option
@shared.recompute_option
@shared.nodes_option
@shared.link_option
@options.seed_option
@options.device_option
@options.timeout_option
@shared.json_option
@click.option("--alone", is_flag=True,
              help="Also measure each bucket of hot steps by itself, under every strategy that holds it.")  # fmt: skip
@click.option("--pictures", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Folder for SVG pictures: tokens per second, and lengths with bounds.")  # fmt: skip
def bench_train(
    model_name: str,
    num_ranks: int,
    workloads: tuple[str, ...],
    profile_path: str,
    pool_spec: str,
    home: str | None,
    rounds: int,
    batch_tokens: int,
    longest: int,
    memory_limit_gb: float | None,
    recompute: bool,
    num_nodes: int,
    link_mbit: float | None,
    seed: int,
    device: str,
    timeout_s: float,
    json_path: Path | None,
    alone: bool,
    pictures: Path | None,
) -> None:
    """Measure hot switching against static strategies and stock.

    All train the same batches, taking turns step by step. Stock pads every sequence to the longest, or fills
    rows in order, under the static strategy that is predicted fastest for that; static and hot pack and
    balance alike. Strategies and bounds are fixed before anything is measured; static strategies that the
    profile predicts to be hopeless are listed and left out.
    """
    shared.check_output(json_path)
    options.refuse_torchrun("bench train")
    link = shared.checked_link(num_nodes, link_mbit, num_ranks)
    import numpy as np

    from hotspa_plugin.cli.plan_tables import print_table
    from hotspa_plugin.config.sizes import model_sizes
    from hotspa_plugin.cost import read_profile
    from hotspa_plugin.search.workloads import workload_batches

    model, dtype = shared.read_model_config(model_name)
    profile = read_profile(profile_path)
    given = model_sizes(model, num_ranks=num_ranks, max_positions=longest, dtype=dtype)
    sizes = given.model_copy(update={"dtype": profile.model.dtype})  # the profile says which type was measured
    profile.check_model(sizes)
    _check_nodes(profile, num_ranks, num_nodes)
    limit = shared.memory_limit_bytes(memory_limit_gb)
    cases = []
    for name in workloads:
        batches = workload_batches(name, rounds + 1, batch_tokens=batch_tokens, longest_tokens=longest, seed=seed)
        contenders, pruned, predicted = choose_contenders(
            profile, num_ranks, name, batches, batch_tokens, longest, pool_spec, home, limit, recompute, seed
        )
        rivals = choose_rivals(profile, num_ranks, contenders[0], limit, recompute) if alone else []
        cases.append((name, batches, contenders, rivals, pruned, predicted))
        for strategy, why in pruned.items():
            click.echo(f"{name}: static {strategy} is left out: {why}")
    run_workload = options.entry_function(BENCH)
    from hotspa_plugin.integrations.megatron.bench_alone import BucketsAlone
    from hotspa_plugin.integrations.megatron.bench_train import Setup, summarize
    from hotspa_plugin.runtime.node_network import rank_networks
    from hotspa_plugin.runtime.worker_pool import WorkerPool

    options.warn_of_memory(num_ranks)
    results: list[dict[str, Any]] = []
    started_s = time.perf_counter()
    per_node = num_ranks // num_nodes
    setup = Setup(
        model=model, sizes=sizes, max_positions=longest, seed=seed, node_of_rank=np.arange(num_ranks) // per_node
    )
    with (
        tempfile.TemporaryDirectory(prefix="hotspa-bench-") as folder,
        rank_networks(num_ranks, link) as networks,
        WorkerPool(
            num_ranks, device=device, collective_timeout_s=timeout_s, call_timeout_s=None, networks=networks,
            env={"LOCAL_WORLD_SIZE": str(per_node)},
        ) as workers,
    ):  # fmt: skip
        for name, batches, contenders, rivals, pruned, predicted in cases:
            buckets_alone = BucketsAlone(contenders[0], rivals) if rivals else None
            steps, refused = run_workload(
                workers, setup, contenders, batches, folder=folder, memory_limit_bytes=_own_limit(profile, limit),
                alone=buckets_alone, tell=lambda said, name=name: click.echo(f"{name}: {said}", err=True),
            )  # fmt: skip
            result = {"name": name, "nodes": num_nodes, **summarize(contenders, steps, refused), "pruned": pruned}
            if buckets_alone is not None and contenders[0].name in steps:
                result["hot_over_buckets_alone"] = buckets_alone.hot_over_alone(steps[contenders[0].name])
            for entry in result["runs"]:
                entry["predicted_step_s"] = predicted.get(entry["name"])
            _compare_prediction(result)
            results.append(result)
            _print(result, print_table)
            if pictures is not None:
                _draw(pictures, result, batches, contenders)
    if json_path is not None:
        shared.write_json(
            json_path,
            {
                "format": "hotspa bench train",
                "model": sizes.name,
                "num_ranks": num_ranks,
                "link_mbit": link,
                "machine": profile.machine.name,
                "rounds": rounds,
                "batch_tokens": batch_tokens,
                "longest_tokens": longest,
                "memory_limit_bytes": limit,
                "seconds": time.perf_counter() - started_s,
                "workloads": results,
            },
        )


def _compare_prediction(result: dict[str, Any]) -> None:
    """Adds what was predicted for hot against static, and whether the order came out so (a tie contradicts nothing)."""
    seconds = {
        kind: [entry["predicted_step_s"] for entry in result["runs"] if entry["kind"] == kind]
        for kind in ("hot", "static")
    }
    ratio = min(seconds["static"]) / seconds["hot"][0]
    measured = result["hot_over_best_static"]
    result["predicted_hot_over_best_static"] = ratio
    result["order_as_predicted"] = (
        None if measured is None else result["hot_over_best_static_tie"] or (ratio > 1) == (measured > 1)
    )


def _draw(folder: Path, result: dict[str, Any], batches: list[Any], contenders: list[Contender]) -> None:
    from hotspa_plugin.report.benchmark_svg import bar_chart, length_histogram

    folder.mkdir(parents=True, exist_ok=True)
    name = f"{result['name']}-{result['nodes']}-nodes"
    measured = sorted((r for r in result["runs"] if "tokens_per_s" in r), key=lambda r: -r["tokens_per_s"])
    rows = [(r["name"], {r["kind"]: r["tokens_per_s"]}) for r in measured]
    shared.write_text(folder / f"tokens-{name}.svg", bar_chart(f"{result['name']}: tokens per second", rows, unit=""))
    (hot,) = [c for c in contenders if c.kind == "hot"]
    bounds = {str(entry.strategy): entry.bound_tokens for entry in hot.pool.entries}
    lengths = [int(length) for batch in batches for length in batch]
    picture = length_histogram(f"{result['name']}: sequences by length in tokens", lengths, bounds)
    shared.write_text(folder / f"lengths-{name}.svg", picture)


def _check_nodes(profile: Profile, num_ranks: int, num_nodes: int) -> None:
    per_node = num_ranks // num_nodes
    profile.check_ranks(num_ranks, per_node)
    if profile.machine.ranks_per_node != per_node:
        raise ValueError(
            f"the profile was measured with {profile.machine.ranks_per_node} ranks a node, but {per_node} were "
            "asked for; measure again with the same --nodes and --link-mbit"
        )


def _own_limit(profile: Profile, limit: int | None) -> int | None:
    """What a run itself may take: the limit less what the process holds without it."""
    return None if limit is None else limit - profile.memory.reserved_bytes


def _print(result: dict[str, Any], print_table: Any) -> None:
    rows = []
    for entry in result["runs"]:
        label = entry["name"] if entry["kind"] != "static" else f"static {entry['name']}"
        if "refused" in entry:
            rows.append([label, *["–"] * 5, entry["refused"], "0"])
            continue
        predicted = entry["predicted_step_s"]
        mean_s = sum(entry["step_s"]) / len(entry["step_s"])
        rows.append(
            [label, f"{entry['tokens_per_s']:,.0f}", f"{entry['padding_fraction']:.1%}",
             f"{entry['exposed_switch_fraction']:.1%}", f"{entry['peak_memory_bytes'] / 1e9:.2f}",
             "–" if predicted is None else f"{predicted / mean_s:.2f}", f"{entry['loss']:.5g}",
             str(len(entry["step_s"]))]
        )  # fmt: skip
    columns = ("run", "tokens/s", "padding", "switching", "GB a rank", "predicted / measured", "loss", "rounds")
    print_table(f"{result['name']}, {result['nodes']} node{'s' if result['nodes'] > 1 else ''}", columns, rows)
    for key, said in (("hot_over_best_static", "the best static"), ("hot_over_stock", "the best stock run")):
        if result[key] is not None:
            low, high = result[f"{key}_range"]
            tie = "; a tie" if result[f"{key}_tie"] else ""
            click.echo(f"  hot over {said}: {result[key]:.3f} ({low:.3f} to {high:.3f} over rounds{tie})")
    if result["order_as_predicted"] is not None:
        as_predicted = "as predicted" if result["order_as_predicted"] else "NOT as predicted"
        predicted = result["predicted_hot_over_best_static"]
        click.echo(f"  order {as_predicted}: hot over static was predicted {predicted:.3f}")
    if result.get("hot_over_buckets_alone") is not None:
        click.echo(
            f"  a hot step takes {result['hot_over_buckets_alone']:.3f} times its buckets' best strategies alone, "
            "switches and flushes"
        )
