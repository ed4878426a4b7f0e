"""What the ranks of these tests do: build models of TransformerEngine's layers, read layouts, switch between them.

TransformerEngine's layers can be built without a GPU, not run; nothing here runs one.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import zlib
from typing import Any

import torch
import torch.distributed as dist

from hotspa_plugin import cpu
from hotspa_plugin.strategy import ParallelStrategy, StrategyPool

SIZES = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 192}
VOCABULARY = 128
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False},
    "gpt": {"normalization": "LayerNorm", "add_bias_linear": True},
    "q/k norms": {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
                  "qk_layernorm": True},
    "experts": {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "num_moe_experts": 4,
                "moe_ffn_hidden_size": 96},
    "grouped experts": {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
                        "num_moe_experts": 4, "moe_ffn_hidden_size": 96, "moe_grouped_gemm": True},
}  # fmt: skip
TIED = {"gpt"}


def start() -> None:
    """Redirects CUDA calls, but leaves TransformerEngine importable."""
    assert "transformer_engine" not in sys.modules or sys.modules["transformer_engine"] is not None
    cpu.enable()
    import transformer_engine.pytorch  # noqa: F401
    from megatron.core.extensions import transformer_engine as extension

    assert extension.HAVE_TE


def build(strategy: ParallelStrategy, model: str, layers: str) -> list[torch.nn.Module]:
    """This rank's chunk of ``MODELS[model]`` with ``layers`` transformer_engine or local; its groups must be active."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    options = MODELS[model]
    config = TransformerConfig(
        **SIZES,
        **options,
        activation_func=torch.nn.functional.silu if options.get("gated_linear_unit") else torch.nn.functional.gelu,
        tensor_model_parallel_size=strategy.tp,
        pipeline_model_parallel_size=strategy.pp,
        # Megatron wants it where experts meet tensor parallel; its norm for local layers refuses it.
        sequence_parallel=strategy.sp and layers == "transformer_engine",
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall",
    )
    choice = {"num_experts": config.num_moe_experts, "moe_grouped_gemm": config.moe_grouped_gemm,
              "qk_layernorm": config.qk_layernorm}  # fmt: skip
    if layers == "transformer_engine":
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**choice)
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(**choice, normalization=config.normalization)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=32,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        share_embeddings_and_output_weights=model in TIED,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    return [chunk]


@functools.cache
def states_of(pool: str) -> Any:
    """The group sets of a pool, made once per process."""
    from hotspa_plugin.integrations.megatron.session import ParallelStates

    world_size = dist.get_world_size()
    checked = StrategyPool.parse(pool).check(world_size=world_size)
    return ParallelStates(checked, rank=dist.get_rank(), world_size=world_size)


def modules_of(pool: str, model: str, layers: str) -> list[Any]:
    """Every strategy's modules, in the pool's order."""
    states = states_of(pool)
    everyone = []
    for index, strategy in enumerate(states.pool.strategies):
        with states.states[index].active():
            chunks = build(strategy, model, layers)
        everyone.append(states.modules(index, chunks, chunks))
    return everyone


def compare_layouts(pool: str, model: str) -> list[dict[str, Any]]:
    """For every strategy: how TransformerEngine's layout differs from that of Megatron's layers, and its kinds."""
    start()
    found = []
    for ours, local in zip(
        modules_of(pool, model, "transformer_engine"), modules_of(pool, model, "local"), strict=True
    ):
        layout, expected = ours.read_layout(), local.read_layout()
        here = dist.get_rank()
        found.append({
            "strategy": ours.label,
            "engine layers": [_num_engine_layers(modules.bare_chunks) for modules in (ours, local)],
            "tensors": {spec.name: spec.shape for spec in layout.tensors},
            "expected tensors": {_engine_name(model, spec.name): spec.shape for spec in expected.tensors},
            "regions": sorted(_places(layout, here)),
            "expected regions": sorted((_engine_name(model, name), *rest) for name, *rest in _places(expected, here)),
            "partial": sorted({layout.tensors[shard.tensor].name for shard in layout.shards(here)
                               if shard.gradient_class.value == "partial"}),
        })  # fmt: skip
    return found


def _engine_name(model: str, local_name: str) -> str:
    """Megatron's local layers call every norm before an MLP as if it were fused with it, which no router is."""
    if "num_moe_experts" in MODELS[model]:
        return local_name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    return local_name


def _num_engine_layers(chunks: Any) -> int:
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    return sum(isinstance(module, TransformerEngineBaseModule) for chunk in chunks for module in chunk.modules())


def _places(layout: Any, rank: int) -> list[tuple]:
    return [
        (layout.tensors[s.tensor].name, s.region.low, s.region.high, s.tp_copy, s.stage_copy)
        for s in layout.shards(rank)
    ]


def whole_values(layout: Any, *, seed: int, low: int = -(2**20), high: int = 2**20) -> dict[str, torch.Tensor]:
    """Random whole numbers for every tensor, the same on every rank: their sums are exact in fp32."""
    values = {}
    for spec in layout.tensors:
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()) + seed)
        values[spec.name] = torch.randint(low, high, spec.shape, generator=generator).float()
    return values


@dataclasses.dataclass
class RoundTrip:
    """``wrong`` names tensors that are not bit for bit what was sent, ``differing`` those with unequal copies."""

    strategy: str
    num_tensors: int
    remote_bytes: int
    wrong: list[str]
    differing: list[str]
    wrong_gradients: list[str]


def switch_and_flush(pool: str, model: str) -> list[RoundTrip] | None:
    """Brings random parameters to every strategy and random gradients home; what arrived, on rank 0."""
    from hotspa_plugin.integrations.megatron.strategy_modules import attach_gradient
    from hotspa_plugin.resharding.transports import TorchDistributedTransport
    from hotspa_plugin.runtime.global_view import gather_global, load_global
    from hotspa_plugin.runtime.hot_switcher import HomeTensors, HotSwitcher, StrategyTensors

    start()
    rank = dist.get_rank()
    states = states_of(pool)
    everyone = modules_of(pool, model, "transformer_engine")
    layouts = [modules.read_layout() for modules in everyone]
    index = states.pool.home_index
    home, home_layout = everyone[index], layouts[index]
    gradients = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in home.parameters.items()}
    parameters = {name: p.data for name, p in home.parameters.items()}
    expected = whole_values(home_layout, seed=1)
    load_global(home_layout, rank, expected, parameters)
    others = [(modules, layout) for modules, layout in zip(everyone, layouts, strict=True) if modules is not home]
    switcher = HotSwitcher(
        rank=rank,
        home=HomeTensors(layout=home_layout, parameters=parameters, gradients=gradients),
        others={
            modules.label: StrategyTensors(
                layout=layout, parameters=modules.parameters, attach_gradient=attach_gradient
            )
            for modules, layout in others
        },
        transport=TorchDistributedTransport(),
        device=torch.device("cpu"),
    )
    switcher.poison = True
    trips = []
    for modules, layout in others:
        switcher.enter(modules.label)
        arrived, differing = gather_global(layout, rank, {n: p.data for n, p in modules.parameters.items()})
        for gradient in gradients.values():
            gradient.zero_()
        sent = whole_values(layout, seed=2)
        _spread(layout, rank, sent, {name: p.main_grad for name, p in modules.parameters.items()})
        switcher.flush(modules.label)
        total = _total(home_layout, rank, gradients)
        if rank == 0:
            trips.append(
                RoundTrip(
                    strategy=modules.label,
                    num_tensors=len(expected),
                    remote_bytes=switcher.switch_bytes(modules.label).remote,
                    wrong=[n for n, value in expected.items() if not torch.equal(arrived[n], value)],
                    differing=differing,
                    wrong_gradients=[n for n, value in sent.items() if not torch.equal(total[n], value)],
                )
            )
    return trips if rank == 0 else None


def _spread(layout: Any, rank: int, values: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    """Gives each tensor's gradient to one data-parallel replica and stage: to its identical copies, or to one part."""
    from hotspa_plugin.layout import GradientClass
    from hotspa_plugin.runtime.global_view import shard_view

    load_global_into = {name: gradient.zero_() for name, gradient in into.items()}
    for shard in layout.shards(rank):
        first = layout.dp_rank[rank] == 0 and shard.stage_copy == 0
        if first and (shard.tp_copy == 0 or shard.gradient_class is GradientClass.IDENTICAL):
            part = values[layout.tensors[shard.tensor].name][
                tuple(slice(l, h) for l, h in zip(shard.region.low, shard.region.high, strict=True))
            ]
            shard_view(load_global_into[shard.parameter], shard).copy_(part)


def _total(layout: Any, rank: int, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """What home's own reduction would make of its accumulators: one whole gradient a tensor, on rank 0.

    Summed over data-parallel replicas, stages that share a tensor, and partial tensor-parallel copies; of identical
    copies the first counts, and all must agree.
    """
    from hotspa_plugin.layout import GradientClass
    from hotspa_plugin.runtime.global_view import shard_view

    mine = [(s, shard_view(gradients[s.parameter], s).clone()) for s in layout.shards(rank)]
    gathered = [None] * dist.get_world_size() if rank == 0 else None
    dist.gather_object(mine, gathered, dst=0)
    if gathered is None:
        return None
    by_copy: dict[int, dict[str, torch.Tensor]] = {}
    for shards in gathered:
        for shard, value in shards:
            spec = layout.tensors[shard.tensor]
            copy = 0 if shard.gradient_class is GradientClass.PARTIAL else shard.tp_copy
            whole = by_copy.setdefault(copy, {}).setdefault(spec.name, torch.zeros(spec.shape))
            whole[tuple(slice(l, h) for l, h in zip(shard.region.low, shard.region.high, strict=True))] += value
    for name, other in ((n, o) for copy, tensors in by_copy.items() if copy for n, o in tensors.items()):
        assert torch.equal(other, by_copy[0][name]), f"tensor-parallel copies of the gradient of {name} differ"
    return by_copy[0]
