"""``hotspa bench switch``, the measured part: our switch, the bare wire, and Megatron's own resharding."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from hotspa_plugin.resharding import build_flush_plan, build_switch_plan, plan_costs


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredModel:
    """A gated, untied GPT to move; the default has 69 million parameters (277 MB in fp32)."""

    num_layers: int = 8
    hidden_size: int = 768
    ffn_hidden_size: int = 2048
    num_attention_heads: int = 12
    vocab_size: int = 8192
    dtype: str = "float32"


def measure_cases(
    rank: int, num_ranks: int, model: MeasuredModel, cases: Sequence[tuple[str, str]], num_rounds: int
) -> list[dict[str, object]]:
    """What one rank does: one row per case, a pair of strategies such as ``("tp4", "tp1")``; equal on all ranks.

    All contenders move the parameters of the same two models and take turns; figures are medians over
    ``num_rounds`` of the slowest rank's seconds. ``flush_s`` is the way back, adding; ``reduce_scatter_s`` what its
    alternative takes before anything comes home: a reduce-scatter of as many bytes over the replicas (None where there
    is one replica).
    """
    from hotspa_plugin.integrations.megatron.process import prepare_process

    prepare_process()

    from megatron.core.resharding.refit import swap_model_weights
    from megatron.core.transformer.module import MegatronModule

    from hotspa_plugin.integrations.megatron import parallel_state
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec, build_gpt
    from hotspa_plugin.integrations.megatron.layout_reader import named_parameters, read_rank
    from hotspa_plugin.process_groups.registry import ProcessGroupRegistry
    from hotspa_plugin.resharding.executor import ReshardExecutor
    from hotspa_plugin.resharding.transports import TorchDistributedTransport
    from hotspa_plugin.resharding.transports.measurement import TORCH_DTYPES, measure_switch
    from hotspa_plugin.runtime.layout_gathering import gather_layout
    from hotspa_plugin.strategy import ParallelStrategy

    spec = GPTSpec(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_attention_heads,
        head_dim=model.hidden_size // model.num_attention_heads,
        padded_vocab_size=model.vocab_size,
        max_positions=64,
    )
    registry = ProcessGroupRegistry()

    def build(text: str) -> tuple:
        strategy = ParallelStrategy.parse(text).resolve(num_ranks)
        state = parallel_state.create(strategy, registry)
        with state.active():
            chunks: list[MegatronModule] = build_gpt(spec, strategy, TORCH_DTYPES[model.dtype])
            dp_rank = chunks[0].pg_collection.dp.rank()
            layout = gather_layout(text, read_rank(chunks, chunks[0].config, dp_rank), dp_rank)
        return state, chunks, layout

    rows = []
    for source, destination in cases:
        # Both anew: megatron-core 0.16 keeps a plan with its target, whatever the next source is.
        before = after = tensors = flush = None  # two models at a time
        (state, before, first), (_, after, second) = build(source), build(destination)
        plan = build_switch_plan(first, second)

        def megatron_resharding() -> None:
            with state.active():
                swap_model_weights(before, after, "gloo")

        tensors = named_parameters(before), named_parameters(after)
        flush = ReshardExecutor(
            build_flush_plan(second, first, plan), rank, TorchDistributedTransport(), tensors[1], tensors[0]
        )
        others = {"megatron_resharding_s": megatron_resharding, "flush_s": flush.run}
        replicas = after[0].pg_collection.dp
        if replicas.size() > 1:
            others["reduce_scatter_s"] = _reduce_scatter(tensors[1].values(), replicas)
        seconds = {"reduce_scatter_s": None}
        seconds |= measure_switch(plan, num_rounds=num_rounds, others=others, tensors=tensors)
        costs = plan_costs(plan)
        num_parameters = sum(int(torch.tensor(t.shape).prod()) for t in first.tensors)
        rows.append(
            {
                "case": f"{source} to {destination}",
                "num_ranks": num_ranks,
                "parameter_bytes": num_parameters * TORCH_DTYPES[model.dtype].itemsize,
                "remote_bytes": costs.remote_bytes,
                "max_send_bytes": costs.max_send_bytes,
                "num_hops": plan.num_hops,
                **seconds,
                "num_rounds_measured": num_rounds,
                "megatron_core": importlib.metadata.version("megatron-core"),
                "torch": torch.__version__,
                "load_average": os.getloadavg()[0],
            }
        )
    return rows


def _reduce_scatter(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup) -> Callable[[], object]:
    """A reduce-scatter, over ``group``, of one line as long as ``tensors`` together."""
    count = -(-sum(tensor.numel() for tensor in tensors) // group.size())
    line, share = torch.ones(count * group.size()), torch.empty(count)
    return lambda: dist.reduce_scatter_tensor(share, line, group=group)
