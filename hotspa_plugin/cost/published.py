"""Published figures of LLaMA models on A800 clusters as profiles, to plan for a cluster without having it.

The stage times and activation sizes are Hydraulis's, the bandwidths FlexSP's; the package data names the sources. What
they lack is extrapolated here and marked so in every profile: see ``_EXTRAPOLATED`` and ``_with_recomputation``.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from hotspa_plugin.cost.profile import (
    LinkFigures,
    MachineFigures,
    MemoryFigures,
    ModelSizes,
    Profile,
    Rate,
    StageFigures,
)

GIGA = 1e9
# (ffn_hidden_size, num_attention_heads); the published file has the other sizes.
_SHAPES = {"llama-7b": (11008, 32), "llama-13b": (13824, 40), "llama-32b": (17920, 64)}
# Rows that the paper's pools use but nobody published: (tp, pp) and the row that they follow from. A stage of half as
# many layers takes half as long in all three coefficients: among the published pairs of the same tp that differ by
# pp 1 and 2 that holds within some percent (32B, tp8: 0.502, 0.502, 0.503).
_EXTRAPOLATED = {"llama-7b": [((1, 1), (1, 2))], "llama-32b": [((16, 2), (16, 1))]}
# Backward costs about two forwards, so a repeated forward adds a third.
_RECOMPUTATION = 4 / 3
# Logits and their gradient, bf16 and fp32, per token and vocabulary row: beside full recomputation they count.
_LOGIT_BYTES = 6
# Copies inside a GPU: half of the A800's 2 TB/s, since each byte is read and written (data sheet, not measured).
_COPY_BYTES_PER_S = 1e12
# Adam reads and writes master, two moments, gradient and parameter: about 30 bytes at some 1.5 TB/s (an estimate).
_OPTIMIZER_S_PER_PARAMETER = 2e-11
_LATENCY_S = 2e-3  # of launching one round of a switch (an estimate)


def published_models() -> tuple[str, ...]:
    """Names of the models that figures were published for."""
    return tuple(_SHAPES)


def published_model(name: str) -> ModelSizes:
    """Sizes of one of them. ValueError naming those there are."""
    figures = _read("a800_stage_time_and_memory.json")["models"]
    if name not in _SHAPES:
        raise ValueError(f"model {name!r} has no published figures; there are some for {', '.join(_SHAPES)}")
    ffn, heads = _SHAPES[name]
    hidden = figures[name]["H"]
    return ModelSizes(
        name=name,
        num_layers=figures[name]["L"],
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=heads,
        head_dim=hidden // heads,
        vocab_size=figures[name]["V"],
    )


def published_profile(name: str) -> Profile:
    """The profile of one of the published models on A800-80GB nodes of 8 GPUs."""
    model = published_model(name)
    data = _read("a800_stage_time_and_memory.json")
    figures = data["models"][name]
    rows = {(row["tp"], row["pp"]): row for row in figures["strategies"]}
    stages = [_published_stage(model, figures["A"], row) for row in rows.values()]
    for (tp, pp), known in _EXTRAPOLATED.get(name, []):
        factor = known[1] / pp
        row = rows[known]
        scaled = {"tp": tp, "pp": pp}
        scaled |= {key: row[key] * factor for key in ("a_ms_per_token2", "b_ms_per_token", "c_ms")}
        note = f"times of tp{known[0]}pp{known[1]} times {factor:g}, as the number of layers in a stage"
        stages.append(_published_stage(model, figures["A"], scaled, origin="extrapolated", note=note))
    stages += [_with_recomputation(model, stage) for stage in stages]
    return Profile(
        source=f"{data['source']}; {_read('cluster_bandwidths.json')['source']}",
        model=model,
        machine=MachineFigures(name="A800-80GB", ranks_per_node=data["gpus_per_node"]),
        stages=tuple(sorted(stages, key=lambda s: (s.tp, s.pp, s.recompute != "none"))),
        memory=MemoryFigures(
            device_bytes=data["gpu_memory_bytes"],
            reserved_bytes=data["gap_bytes"] + figures["margin_bytes"],
            parameter_bytes=2,
            gradient_bytes=4,
            optimizer_bytes=12,
        ),
        links=_links(),
        optimizer_s_per_parameter=_OPTIMIZER_S_PER_PARAMETER,
        reduce_overlaps=True,
        time_error=0.1,
    )


def _published_stage(
    model: ModelSizes, activation: dict[str, float], row: dict[str, float], *, origin: str = "published", note: str = ""
) -> StageFigures:
    tp = row["tp"]
    return StageFigures(
        tp=tp,
        pp=row["pp"],
        a_s_per_token2=row["a_ms_per_token2"] / 1e3,
        b_s_per_token=row["b_ms_per_token"] / 1e3,
        c_s=row["c_ms"] / 1e3,
        # pp micro-batches are in flight on the first of pp stages: as many layers as without a pipeline
        activation_bytes_per_token=model.num_layers * model.hidden_size / tp * activation[str(tp)],
        origin=origin,
        note=note,
    )


def _with_recomputation(model: ModelSizes, stage: StageFigures) -> StageFigures:
    """Full recomputation, which nobody published: a third more time, kept inputs of layers plus one layer's work."""
    kept = 2 * model.num_layers * model.hidden_size / stage.tp
    one_layer = stage.activation_bytes_per_token / model.num_layers
    logits = _LOGIT_BYTES * model.vocab_size / stage.tp
    return stage.model_copy(
        update={
            "recompute": "full",
            "a_s_per_token2": stage.a_s_per_token2 * _RECOMPUTATION,
            "b_s_per_token": stage.b_s_per_token * _RECOMPUTATION,
            "c_s": stage.c_s * _RECOMPUTATION,
            "activation_bytes_per_token": kept + one_layer + logits,
            "origin": "extrapolated",
            "note": "; ".join(
                filter(None, [stage.note, "4/3 of the time without recomputation; inputs of layers kept"])
            ),
        }
    )


def _links() -> LinkFigures:
    """Links of the published cluster.

    A switch is an exchange of all with all, so its rates come from the all-to-all figures. Of n ranks' data,
    (n - 8) / (n - 1) crosses nodes and the rest does not; the rate of a card (one a rank: pairs of ranks and groups of
    two across nodes got the same 8 GB/s each, all at once) is the part that crosses.
    """
    bandwidths = _read("cluster_bandwidths.json")
    all_to_all = {int(n): rate * GIGA for n, rate in bandwidths["all_to_all_GBps"].items()}
    reduce_rates = bandwidths["all_reduce_bus_GBps"]
    # Group in the file: its ranks in each of two nodes.
    between = {"2_across": 1, "4_across": 2, "8_across": 4, "16": 8}

    def rates(values: dict[int, float]) -> tuple[Rate, ...]:
        return tuple(Rate(num_ranks=n, bytes_per_s=rate) for n, rate in sorted(values.items()))

    return LinkFigures(
        cards_per_node=8,
        intra_node=rates({n: rate * (n - 1) / n for n, rate in all_to_all.items() if n <= 8}),
        inter_node=rates({n: rate * (n - 8) / n for n, rate in all_to_all.items() if n > 8}),
        all_reduce_in_node=rates({int(n): rate * GIGA for n, rate in reduce_rates["one_node"].items()}),
        all_reduce_between_nodes=rates({between[n]: rate * GIGA for n, rate in reduce_rates["two_nodes"].items()}),
        copy_bytes_per_s=_COPY_BYTES_PER_S,
        latency_s=_LATENCY_S,
        note="rates of switches from all-to-all figures; copies, latency and optimizer are estimates",
    )


def _read(name: str) -> dict[str, Any]:
    file = resources.files("hotspa_plugin.cost").joinpath(name)
    return json.loads(file.read_text(encoding="utf-8"))
