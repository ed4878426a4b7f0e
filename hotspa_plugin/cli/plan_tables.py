"""Plans and simulations as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotspa_plugin.cost import StepTime
    from hotspa_plugin.search.planning import Gain, Plan, Prediction
    from hotspa_plugin.search.simulation import Simulated
    from hotspa_plugin.search.step_model import StepModel

TIME_COLUMNS = ("compute", "bubbles", "switch", "flush", "reduce", "step")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    click.echo(title)
    for row in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        click.echo(("  " + "  ".join(cells)).rstrip())


def time_cells(time: StepTime) -> list[str]:
    parts = (time.compute_s, time.bubble_s, time.switch_s, time.flush_s, time.reduce_s + time.optimizer_s, time.total_s)
    return [f"{seconds:.3g}" if 0 < seconds < 0.1 else f"{seconds:.2f}" for seconds in parts]


def print_plan(plan: Plan, model: StepModel) -> None:
    """What was found, fastest first, and the advice."""
    rows = [[f"static {p.pool}", "", *time_cells(p.mean)] for p in plan.statics]
    rows += [[f"hot {p.pool}", str(p.pool.home), *time_cells(p.mean)] for p in plan.hot]
    if plan.hot_per_batch is not None:
        best = plan.hot_per_batch
        rows.append(["  the first, bounds chosen for each batch", str(best.pool.home), *time_cells(best.mean)])
    print_table("seconds of a step (mean of batches)", ("strategy", "home", *TIME_COLUMNS), rows)
    click.echo(
        f"{plan.num_feasible} of {plan.num_candidates} static strategies hold {plan.longest_tokens:,} tokens; "
        f"the {len(plan.statics)} fastest are priced"
    )
    chosen = plan.chosen.pool
    gigabytes = [
        [str(e), *(_gigabytes(b) for b in (m.home_bytes, m.slab_bytes, m.staging_bytes, m.activation_bytes,
                                               m.margin_bytes, m.reserved_bytes, m.total_bytes)), f"{tokens:,}"]
        for e, m, tokens in zip(chosen.entries, model.bucket_memory(chosen), chosen.micro_batch_tokens, strict=True)
    ]  # fmt: skip
    columns = ("bucket", "home", "slab", "staging", "activations", "margin", "reserved", "total", "tokens that fit")
    print_table(f"memory of a rank in GB, of {_gigabytes(model.memory.limit_bytes)}", columns, gigabytes)
    for note in notes(plan, model):
        click.echo(f"note: {note}")
    click.echo(advice(plan))


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f}" if num_bytes == 0 or num_bytes >= 1e9 else f"{num_bytes / 1e9:.2g}"


def advice(plan: Plan) -> str:
    best_static = plan.statics[0]
    if not plan.hot or plan.gain is None:
        return f"stay static: {best_static.pool}; no pool of two strategies fits in memory"
    said = f"predicted gain over the best static strategy {_gain(plan.gain)}"
    if plan.gain_per_batch is not None:
        said += f"; with bounds chosen for each batch {plan.gain_per_batch.ratio:.3f}"
    if plan.advises_hot:
        return f"switch: --pool '{plan.chosen.pool}' --home {plan.chosen.pool.home}; {said}"
    return f"stay static: {best_static.pool}; {said}"


def _gain(gain: Gain) -> str:
    meaning = {
        "clear": "beyond the error of the figures",
        "likely": f"within the {gain.model_error:.0%} error of the figures",
        "open": "within what batches vary",
    }[gain.certainty]
    return f"{gain.ratio:.3f} ({gain.low:.3f} to {gain.high:.3f} over batches; {meaning})"


def notes(plan: Plan, model: StepModel) -> list[str]:
    """Figures that nobody measured, of what is compared."""
    found = {}
    for prediction in (*plan.statics[:1], *plan.hot[:1]):
        for entry in prediction.pool.entries:
            stage = model.profile.stage(entry.strategy)
            if stage.origin == "extrapolated":
                found[f"{entry.strategy} is extrapolated: {stage.note}"] = None
    return list(found)


def plan_json(plan: Plan, model: StepModel, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": "hotspa plan",
        "settings": settings,
        "advises": "hot" if plan.advises_hot else "static",
        "chosen": prediction_json(plan.chosen, model),
        "gain": _gain_json(plan.gain),
        "gain_per_batch": _gain_json(plan.gain_per_batch),
        "statics": [prediction_json(p, model) for p in plan.statics],
        "hot": [prediction_json(p, model) for p in plan.hot],
        "hot_per_batch": None if plan.hot_per_batch is None else prediction_json(plan.hot_per_batch, model),
        "longest_tokens": plan.longest_tokens,
        "num_candidates": plan.num_candidates,
        "num_feasible_static": plan.num_feasible,
        "notes": notes(plan, model),
    }


def prediction_json(prediction: Prediction, model: StepModel | None = None) -> dict[str, Any]:
    pool = prediction.pool
    content: dict[str, Any] = {
        "pool": str(pool),
        "home": str(pool.home),
        "micro_batch_tokens": {
            str(e.strategy): tokens for e, tokens in zip(pool.entries, pool.micro_batch_tokens, strict=True)
        },
        "step_s": {**dataclasses.asdict(prediction.mean), "total_s": prediction.mean.total_s},
    }
    if model is not None:
        content["memory_bytes"] = {
            str(e.strategy): {**dataclasses.asdict(m), "margin_bytes": m.margin_bytes, "total_bytes": m.total_bytes}
            for e, m in zip(pool.entries, model.bucket_memory(pool), strict=True)
        }
        content["origin"] = {str(e.strategy): model.profile.stage(e.strategy).origin for e in pool.entries}
    return content


def _gain_json(gain: Gain | None) -> dict[str, Any] | None:
    return None if gain is None else {**dataclasses.asdict(gain), "certainty": gain.certainty}


def print_simulated(result: Simulated) -> None:
    plan = result.plan
    rows = [["best static", str(plan.statics[0].pool), "", *time_cells(plan.statics[0].mean)]]
    for paper in result.paper:
        name = "paper's pool" + (" of four" if "four" in paper.setting.name else "")
        entries = " ".join(map(str, paper.setting.up_to(result.context_tokens)))
        if paper.prediction is None:
            rows.append([f"{name}, does not fit", entries, "", *["–"] * len(TIME_COLUMNS)])
        else:
            rows.append([name, entries, str(paper.prediction.pool.home), *time_cells(paper.prediction.mean)])
    fixed = plan.hot[0] if plan.hot else None
    for name, best in (("ours, fixed bounds", fixed), ("ours, per batch", plan.hot_per_batch)):
        if best is not None:
            rows.append([name, str(best.pool), str(best.pool.home), *time_cells(best.mean)])
    title = (
        f"{result.model} on {result.num_ranks} GPUs, context {result.context_tokens:,}, "
        f"{result.global_batch_sequences:,} sequences, gradients in the slab {result.slab_gradients}"
    )
    print_table(title, ("", "pool", "home", *TIME_COLUMNS), rows)
    for paper in result.paper:
        if paper.prediction is None:
            click.echo(f"  {paper.setting.name}: {paper.misfit}")
    click.echo(f"  best static / ours {result.gain:.3f}" + ("" if result.pays else "; hot switching does not pay here"))


def simulated_json(result: Simulated) -> dict[str, Any]:
    return {
        "model": result.model,
        "num_ranks": result.num_ranks,
        "context_tokens": result.context_tokens,
        "global_batch_sequences": result.global_batch_sequences,
        "slab_gradients": result.slab_gradients,
        "recompute": list(result.recompute),
        "best_static": prediction_json(result.best_static),
        "paper": [
            {
                "setting": p.setting.name,
                "prediction": None if p.prediction is None else prediction_json(p.prediction),
                "misfit": p.misfit,
            }
            for p in result.paper
        ],
        "ours": prediction_json(result.ours),
        "ours_fixed_bounds": prediction_json(result.plan.hot[0]) if result.plan.hot else None,
        "gain": result.gain,
        "pays": result.pays,
    }
