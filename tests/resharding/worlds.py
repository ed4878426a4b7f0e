"""Helpers: local tensors of all ranks of a layout, filled from global tensors, and loopback runs."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from hotspa_plugin.layout import GPTSizes, ShardLayout, gpt_layout
from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.plan import ReshardPlan
from hotspa_plugin.resharding.transports import LoopbackWorld

SMALL = GPTSizes(
    num_layers=6,
    hidden_size=12,
    ffn_hidden_size=24,
    num_attention_heads=12,
    vocab_size=50,
    qk_norm=True,
    biases=True,
    tied_embeddings=True,
    num_learned_positions=5,
    dtype="float32",
)
LLAMA = GPTSizes(
    num_layers=6,
    hidden_size=12,
    ffn_hidden_size=24,
    num_attention_heads=12,
    vocab_size=50,
    num_query_groups=6,
    kv_channels=2,
    dtype="float32",
)


def strategies(num_ranks: int, tps=(1, 2, 3, 4), pps=(1, 2, 3)) -> list[tuple[int, int]]:
    return [(tp, pp) for tp, pp in itertools.product(tps, pps) if num_ranks % (tp * pp) == 0]


def layout(sizes: GPTSizes, num_ranks: int, tp: int, pp: int, sequence_parallel: bool | None = None) -> ShardLayout:
    return gpt_layout(
        sizes, tp=tp, pp=pp, dp=num_ranks // (tp * pp), sequence_parallel=sequence_parallel, vocab_divisor=12
    )


def local_tensors(layout: ShardLayout, rank: int, dtype: torch.dtype, fill: float) -> dict[str, torch.Tensor]:
    lengths: dict[str, int] = {}
    for shard in layout.shards(rank):
        reach = 1 + shard.storage_offset
        reach += sum((n - 1) * s for n, s in zip(shard.region.shape, shard.strides, strict=True))
        lengths[shard.parameter] = max(lengths.get(shard.parameter, 0), reach)
    return {name: torch.full((length,), fill, dtype=dtype) for name, length in lengths.items()}


def view(tensors: dict[str, torch.Tensor], shard) -> torch.Tensor:
    line = tensors[shard.parameter]
    return line.as_strided(shard.region.shape, shard.strides, line.storage_offset() + shard.storage_offset)


def box(shard) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(shard.region.low, shard.region.high, strict=True))


def random_globals(layout: ShardLayout, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(dtype) for spec in layout.tensors}


def fill(layout: ShardLayout, rank: int, tensors: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for shard in layout.shards(rank):
        view(tensors, shard).copy_(values[layout.tensors[shard.tensor].name][box(shard)])


def assert_filled(layout: ShardLayout, rank: int, tensors, values) -> None:
    for shard in layout.shards(rank):
        spec = layout.tensors[shard.tensor]
        got, wanted = view(tensors, shard), values[spec.name][box(shard)]
        assert torch.equal(got, wanted), f"rank {rank}: {spec.name} {shard.region}"


def run_loopback(
    plan: ReshardPlan, sources, destinations, budget: int | None = None, times: int = 1, **options
) -> list:
    world = LoopbackWorld(plan.num_ranks)
    executors = [
        ReshardExecutor(plan, rank, world.transport(rank), sources[rank], destinations[rank], budget, **options)
        for rank in range(plan.num_ranks)
    ]
    for _ in range(times):
        stats = world.run(executors)
    return stats


def tp_copies_agree(layout: ShardLayout, tensors: list[dict[str, torch.Tensor]]) -> bool:
    """Whether identical copies along tensor parallel are bit-identical."""
    seen: dict[tuple, torch.Tensor] = {}
    for rank in range(layout.num_ranks):
        for shard in layout.shards(rank):
            if shard.gradient_class.value == "identical":
                key = (shard.tensor, shard.region, int(layout.dp_rank[rank]), shard.stage_copy)
                if not torch.equal(seen.setdefault(key, view(tensors[rank], shard)), view(tensors[rank], shard)):
                    return False
    return True


def node_of_rank(num_ranks: int, ranks_per_node: int) -> np.ndarray:
    return np.arange(num_ranks) // ranks_per_node
