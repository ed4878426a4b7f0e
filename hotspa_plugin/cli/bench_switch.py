"""``hotspa bench switch``: plans against their bounds, and switches against the bare wire and Megatron's resharding."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hotspa_plugin.cli import options
from hotspa_plugin.cli import planning_options as shared

MEASURE = "hotspa_plugin.integrations.megatron.switch_measurement:measure_cases"
NODE_MEASUREMENT = "hotspa_plugin.integrations.megatron.node_measurement"
DEFAULT_MEASURED = "tp4:tp1,tp2pp2:tp1,tp1:tp2pp2,tp4:tp2pp2"
DEFAULT_ON_NODES = "tp4:tp1,tp2pp2:tp1"


@click.command()
@click.option("--ranks", "num_ranks", type=click.IntRange(min=0), default=4, show_default="4", metavar="N",
              help="Local ranks to measure on; 0 plans only.")  # fmt: skip
@click.option("--plan-ranks", type=click.IntRange(min=2), metavar="N", help="Only the planned cases with N ranks.")
@click.option("--model", metavar="NAME", help="Only the planned cases of one model: llama-7b, llama-13b or llama-32b.")
@click.option("--policy", "policies", multiple=True, metavar="NAME", help="Only this sender policy; may be repeated.")
@click.option("--cases", "measured", show_default=f"{DEFAULT_MEASURED}; on two nodes {DEFAULT_ON_NODES}",
              metavar="FROM:TO,...", help="Switches to measure, as pairs of strategies.")  # fmt: skip
@click.option("--rounds", "num_rounds", type=click.IntRange(min=1), default=10, show_default="10", metavar="N",
              help="Times that each measured contender runs, all taking turns.")  # fmt: skip
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a picture (SVG) of who sends what to whom in the first planned case.")  # fmt: skip
@click.option("--no-plans", is_flag=True, help="Measure only.")
@shared.nodes_option
@shared.link_option
@click.option("--timeline", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="With two nodes: write a picture (SVG) of a step with overlap there.")  # fmt: skip
@options.timeout_option
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write all figures there.")  # fmt: skip
def switch(
    num_ranks: int,
    plan_ranks: int | None,
    model: str | None,
    policies: tuple[str, ...],
    measured: str | None,
    num_rounds: int,
    picture: Path | None,
    no_plans: bool,
    num_nodes: int,
    link_mbit: float | None,
    timeline: Path | None,
    timeout_s: float,
    json_path: Path | None,
) -> None:
    """Plan the paper's switches against their bounds, and measure some on this machine.

    Plans: bytes between ranks and across nodes, the most that a rank sends and receives, and the most that
    passes a network card, each with the least possible given the goals before it. Measured: a switch of 277 MB
    of parameters, beside a raw all-to-all of the same bytes, a copy, and megatron.core.resharding, all taking
    turns in one run.
    """
    from rich.console import Console

    options.require_packages()
    console = Console()
    if console.width < _TABLE_WIDTH:
        console.width = _TABLE_WIDTH  # a narrow terminal breaks lines, which still says more than cut figures
    shared.check_output(json_path)
    shared.checked_link(num_nodes, link_mbit, num_ranks)
    if picture is not None and no_plans:
        raise ValueError("--picture shows a planned case: leave --no-plans out")
    if timeline is not None and num_nodes == 1:
        raise ValueError("--timeline shows a step on two nodes: give --nodes 2 --link-mbit M too")
    planned: list[dict[str, Any]] = []
    if not no_plans:
        planned = _plan(console, plan_ranks, model, policies)
        if picture is not None:
            _draw_traffic(picture, plan_ranks, model)
    found: dict[str, Any] = {"plans": planned, "measured": []}
    if num_ranks and link_mbit is None:
        cases = _parse_cases(measured or DEFAULT_MEASURED, num_ranks)
        found["measured"] = _measure(console, num_ranks, cases, num_rounds, timeout_s)
    elif num_ranks:
        cases = _parse_cases(measured or DEFAULT_ON_NODES, num_ranks)
        found["nodes"] = _measure_nodes(console, num_ranks, link_mbit, cases, num_rounds, timeline, timeout_s)
    if json_path is not None:
        shared.write_text(json_path, json.dumps(found, indent=1))


def _plan(console: Any, num_ranks: int | None, model: str | None, policies: Sequence[str]) -> list[dict[str, Any]]:
    from rich.progress import track

    from hotspa_plugin.resharding.bench import POLICIES, plan_rows, switch_cases

    if unknown := set(policies) - set(POLICIES):
        raise ValueError(f"--policy {min(unknown)}: choose among {', '.join(POLICIES)}")
    rows: list[dict[str, Any]] = []
    for case in track(switch_cases(num_ranks, model), description="planning", console=console, transient=True):
        rows.extend(plan_rows([case], policies or POLICIES))
    console.print(_table("Planned, MB; in brackets how far over the least possible", rows, _PLAN_COLUMNS))
    return rows


def _draw_traffic(path: Path, num_ranks: int | None, model: str | None) -> None:
    from hotspa_plugin.report.traffic_svg import traffic_svg
    from hotspa_plugin.resharding import build_switch_plan, traffic
    from hotspa_plugin.resharding.bench import switch_cases

    case = switch_cases(num_ranks, model)[0]
    layouts = case.layouts()
    squares = [
        (policy, traffic(build_switch_plan(*layouts, policy=policy, node_of_rank=case.node_of_rank)))
        for policy in ("balanced", "new_greedy")
    ]
    path.write_text(traffic_svg(case.name, squares, case.node_of_rank), encoding="utf-8")


def _measure(
    console: Any, num_ranks: int, cases: list[tuple[str, str]], num_rounds: int, timeout_s: float
) -> list[dict[str, Any]]:
    from hotspa_plugin.integrations.megatron.switch_measurement import MeasuredModel
    from hotspa_plugin.runtime.launch import launch

    console.print(f"measuring {len(cases)} switches on {num_ranks} ranks, {num_rounds} rounds each")
    rows = launch(MEASURE, num_ranks, (MeasuredModel(), cases, num_rounds), timeout_s=timeout_s)[0]
    console.print(_table("Measured, medians in seconds", rows, _MEASURED_COLUMNS))
    return rows


def _measure_nodes(
    console: Any,
    num_ranks: int,
    link_mbit: float,
    cases: list[tuple[str, str]],
    num_rounds: int,
    timeline: Path | None,
    timeout_s: float,
) -> dict[str, Any]:
    from hotspa_plugin.integrations.megatron.node_measurement import OverlapCase, summarize_overlap
    from hotspa_plugin.layout import GPTSizes
    from hotspa_plugin.report.reader import read_run
    from hotspa_plugin.report.timeline_svg import write_timeline_svg
    from hotspa_plugin.runtime.node_network import ThrottledNodes
    from hotspa_plugin.runtime.worker_pool import WorkerPool

    sizes = GPTSizes(num_layers=4, hidden_size=512, ffn_hidden_size=1408, num_attention_heads=16, vocab_size=4096,
                     dtype="float32")  # fmt: skip
    console.print(f"measuring on two nodes of {num_ranks // 2} ranks, joined by {link_mbit:g} Mbit/s")
    with (
        tempfile.TemporaryDirectory(prefix="hotspa-bench-") as folder,
        ThrottledNodes(link_mbit=link_mbit) as nodes,
        WorkerPool(num_ranks, device="cpu", collective_timeout_s=timeout_s, call_timeout_s=None,
                   networks=nodes.networks(num_ranks)) as workers,
    ):  # fmt: skip
        common = (sizes, cases, num_rounds, num_ranks // 2)
        policies = workers.run_positional(
            f"{NODE_MEASUREMENT}:measure_policies", [(rank, num_ranks, *common) for rank in range(num_ranks)]
        )[0]
        console.print(_table("Policies, medians in seconds", policies, _POLICY_COLUMNS))
        case = OverlapCase(ranks_per_node=num_ranks // 2)
        overlap = summarize_overlap(
            workers.run_positional(
                f"{NODE_MEASUREMENT}:measure_overlap", [(rank, num_ranks, case, folder) for rank in range(num_ranks)]
            )
        )
        console.print(_table("Overlap of training steps, medians in seconds", overlap, _OVERLAP_COLUMNS))
        if timeline is not None:
            write_timeline_svg(read_run(Path(folder) / "both"), timeline)
    return {"link_mbit": link_mbit, "policies": policies, "overlap": overlap}


def _parse_cases(text: str, num_ranks: int) -> list[tuple[str, str]]:
    from hotspa_plugin.strategy import ParallelStrategy

    cases = []
    for pair in filter(None, text.split(",")):
        names = pair.strip().split(":")
        if len(names) != 2:
            raise ValueError(f"--cases {pair!r}: write pairs such as tp4:tp1, parted by commas")
        for name in names:
            ParallelStrategy.parse(name).resolve(num_ranks)
        cases.append((names[0], names[1]))
    if not cases:
        raise ValueError("--cases is empty: write pairs such as tp4:tp1, parted by commas")
    return cases


def _over(row: dict[str, Any], name: str) -> str:
    value, bound = row[name], row[f"{name}_bound"]
    over = "" if value <= bound * 1.0005 else f" (+{value / bound - 1:.1%})" if bound else " (least: 0)"
    return f"{value / 1e6:,.1f}{over}"


_TABLE_WIDTH = 150
_PLAN_COLUMNS = {
    "case": lambda row: row["case"],
    "policy": lambda row: row["policy"],
    "ranks a card": lambda row: str(row["ranks_per_card"]),
    "between ranks": lambda row: _over(row, "remote_bytes"),
    "across nodes": lambda row: _over(row, "cross_node_bytes"),
    "most sent": lambda row: _over(row, "max_send_bytes"),
    "most received": lambda row: _over(row, "max_receive_bytes"),
    "most on a card": lambda row: _over(row, "max_card_bytes"),
    "plan s": lambda row: f"{row['plan_seconds']:.3f}",
}
_MEASURED_COLUMNS = {
    "case": lambda row: row["case"],
    "switch": lambda row: f"{row['switch_s']:.3f}",
    "raw all-to-all": lambda row: f"{row['raw_all_to_all_s']:.3f}",
    "raw copy": lambda row: f"{row['raw_copy_s']:.3f}",
    "over raw": lambda row: f"{row['switch_s'] / max(row['raw_all_to_all_s'] + row['raw_copy_s'], 1e-9):.2f}x",
    "Megatron resharding": lambda row: f"{row['megatron_resharding_s']:.3f}",
    "faster": lambda row: f"{row['megatron_resharding_s'] / row['switch_s']:.2f}x",
    "flush": lambda row: f"{row['flush_s']:.3f}",
    "reduce-scatter": lambda row: "-" if row["reduce_scatter_s"] is None else f"{row['reduce_scatter_s']:.3f}",
}
_POLICY_COLUMNS = {
    "case": lambda row: row["case"],
    "balanced": lambda row: f"{row['balanced_s']:.2f}",
    "new_greedy": lambda row: f"{row['new_greedy_s']:.2f}",
    "times faster": lambda row: f"{row['measured_ratio']:.2f}x",
    "predicted": lambda row: f"{row['predicted_ratio']:.2f}x",
}
_OVERLAP_COLUMNS = {
    "overlap": lambda row: row["overlap"],
    "step": lambda row: f"{row['step_s']:.2f}",
    "compute": lambda row: f"{row['compute_s']:.2f}",
    "switch exposed": lambda row: f"{row['switch_s']:.2f}",
    "switch hidden": lambda row: f"{row['switch_hidden_s']:.2f} ({row['switch_hidden_share']:.0%})",
    "flush exposed": lambda row: f"{row['flush_s']:.2f}",
    "flush hidden": lambda row: f"{row['flush_hidden_s']:.2f} ({row['flush_hidden_share']:.0%})",
}


def _table(title: str, rows: Sequence[dict[str, Any]], columns: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("case", "policy") else "right", no_wrap=name == "case")
    for row in rows:
        table.add_row(*(show(row) for show in columns.values()))
    return table
