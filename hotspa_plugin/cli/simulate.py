"""``hotspa simulate``: the paper's settings, and larger ones, from published figures."""

from __future__ import annotations

import re
from pathlib import Path

import click

from hotspa_plugin.cli import planning_options as shared

SEQUENCES_PER_RANK = 16  # the paper's 512 on 32 GPUs
PAPER_BATCH = 512
LARGE_SCALES = (256, 1024, 4096)


@click.command()
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="MODEL:GPUS",
    help="Such as llama-7b:8; may be repeated.  [default: the paper's]",
)
@click.option("--large", is_flag=True, help=f"Also llama-32b on {', '.join(map(str, LARGE_SCALES))} GPUs.")
@click.option(
    "--context",
    "contexts",
    type=click.IntRange(min=1),
    multiple=True,
    default=(8192, 16384, 32768),
    show_default=True,
    metavar="TOKENS",
    help="Sequences are cut to this; may be repeated.",
)
@click.option(
    "--lengths",
    default="wikipedia",
    show_default=True,
    metavar="SPEC|FILE",
    help="As for hotspa plan.",
)
@click.option(
    "--global-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Sequences of a batch.  [default: {PAPER_BATCH}, {SEQUENCES_PER_RANK} a GPU above 32 GPUs]",
)
@shared.memory_limit_option
@shared.slab_gradients_option
@click.option(
    "--recompute/--no-recompute",
    default=False,
    show_default=True,
    help="Consider full recomputation too, whose figures are extrapolated.",
)
@shared.json_option
@click.option("--picture", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also draw the time split of static and ours as an SVG picture.")  # fmt: skip
def simulate(
    settings: tuple[str, ...],
    large: bool,
    contexts: tuple[int, ...],
    lengths: str,
    global_batch: int | None,
    memory_limit_gb: float | None,
    slab_gradients: str,
    recompute: bool,
    json_path: Path | None,
    picture: Path | None,
) -> None:
    """Simulate hot switching on A800 clusters from published figures.

    For every setting: the best static strategy, the paper's pools where they fit in memory, and ours, on the
    same batches with the same packing and balance; seconds split into compute, pipeline bubbles, switches,
    flushes, and home's reduction with the optimizer.

    \b
    hotspa simulate --context 32768
    hotspa simulate --setting llama-32b:1024 --lengths lognormal:400,1.5
    """
    shared.check_output(json_path)
    shared.check_output(picture, "--picture")
    from hotspa_plugin.cli.plan_tables import print_simulated, print_table, simulated_json
    from hotspa_plugin.search import LengthSource, paper_settings
    from hotspa_plugin.search.simulation import simulate as run

    papers = paper_settings()
    chosen = [_setting(text) for text in settings] or list(dict.fromkeys((p.model, p.num_ranks) for p in papers))
    if large:
        chosen += [("llama-32b", scale) for scale in LARGE_SCALES]
    results, failed = [], []
    for model, num_ranks in chosen:
        batch = global_batch or max(PAPER_BATCH, SEQUENCES_PER_RANK * num_ranks)
        for context in sorted(contexts):
            source = LengthSource.open(lengths, max_tokens=context)
            try:
                result = run(
                    model,
                    num_ranks,
                    context,
                    lambda seed, source=source, batch=batch: source.draw(batch, seed=seed),
                    global_batch_sequences=batch,
                    settings=[p for p in papers if (p.model, p.num_ranks) == (model, num_ranks)],
                    slab_gradients=slab_gradients,
                    recompute=shared.recompute_modes(recompute),
                    memory_limit_bytes=shared.memory_limit_bytes(memory_limit_gb),
                )
            except ValueError as error:
                if len(chosen) * len(contexts) == 1:
                    raise
                failed.append({"model": model, "num_ranks": num_ranks, "context_tokens": context, "reason": str(error)})
                click.echo(f"{model} on {num_ranks} GPUs, context {context:,}: {error}")
                continue
            print_simulated(result)
            results.append(result)
    rows = [
        [f"{r.model} on {r.num_ranks}", f"{r.context_tokens:,}", str(r.best_static.pool.home), str(r.ours.pool),
         f"{r.gain:.3f}", "yes" if r.pays else "no"]
        for r in results
    ]  # fmt: skip
    print_table("where hot switching pays", ("setting", "context", "static", "ours", "static / ours", "pays"), rows)
    if picture is not None:
        shared.write_text(picture, _drawn(results))
    if json_path is not None:
        content = {
            "format": "hotspa simulation",
            "lengths": lengths,
            "results": [simulated_json(r) for r in results],
            "refused": failed,
        }
        shared.write_json(json_path, content)


def _drawn(results) -> str:
    from hotspa_plugin.report.benchmark_svg import bar_chart

    rows = []
    for result in results:
        about = f"{result.model} on {result.num_ranks}, {result.context_tokens // 1024}K"
        for name, prediction in (("static", result.best_static), ("ours", result.ours)):
            mean = prediction.mean
            parts = {"compute": mean.compute_s, "bubbles": mean.bubble_s, "switch": mean.switch_s,
                     "flush": mean.flush_s, "reduction and optimizer": mean.reduce_s + mean.optimizer_s}  # fmt: skip
            rows.append((f"{about}, {name}", parts))
    return bar_chart("seconds of a simulated step", rows, unit="s")


def _setting(text: str) -> tuple[str, int]:
    from hotspa_plugin.cost import published_models

    match = re.fullmatch(r"([\w.-]+):(\d+)", text)
    if not match or match[1] not in published_models() or int(match[2]) < 1:
        raise ValueError(
            f"--setting {text}: write MODEL:GPUS, such as llama-7b:8; models are {', '.join(published_models())}"
        )
    return match[1], int(match[2])
