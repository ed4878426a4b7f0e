"""What rank processes do for the DeepSpeed tests."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=4096)  # fmt: skip


def prepare() -> None:
    """Leaves out the compiled shared-memory op, which would take most of a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_model(family: str, seed: int = 0, **changes: Any):
    """A tiny random model of a transformers family, the same wherever it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, **changes}
    if family == "qwen3":
        sizes.setdefault("head_dim", 8)
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases that are all 1 or 0 hide errors
    return model


def make_batch(lengths: list[int], seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[np.ndarray]:
    generator = np.random.RandomState(seed)
    return [generator.randint(0, vocab_size, length) for length in lengths]


def ds_config(*, pool: str | None, stage: int = 0, **changes: Any) -> dict[str, Any]:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    if pool is not None:
        config["hotspa"] = {"pool": pool, **changes.pop("block", {})}
    config.update(changes)
    return config


def train(
    *, family: str, config: dict[str, Any], batches: list[list[int]], sizes: dict | None = None
) -> dict[str, Any]:
    """Trains one step per batch on every rank; rank 0 returns losses, norms and whole weights."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    engine, *_ = hotspa.initialize(model=make_model(family, **(sizes or {})), config=config)
    engine.loop.switcher.poison = True
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        losses.append(engine.train_batch(make_batch(lengths, step)).item())
        norms.append(float(engine.get_global_grad_norm() or "nan"))
    weights, differing = engine.gather_parameters()
    return {"losses": losses, "norms": norms, "weights": weights, "differing": differing}


def train_reference(*, family: str, batches: list[list[int]], sizes: dict | None = None) -> dict[str, Any]:
    """The same in one process: transformers' own attention, torch's AdamW and clipping, sequence by sequence."""
    model = make_model(family, **(sizes or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        optimizer.zero_grad()
        num_targets = sum(length - 1 for length in lengths)
        total = 0.0
        for tokens in map(torch.from_numpy, make_batch(lengths, step)):
            if len(tokens) == 1:
                continue
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "weights": {n: p.data for n, p in model.named_parameters()}}


def train_megatron(
    *, config: dict[str, Any], batches: list[list[int]], preset: str, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Like ``train`` for a Megatron-core preset; the initial whole weights are returned as well."""
    prepare()
    from hotspa_plugin.integrations.megatron import process

    process.prepare_process()
    import hotspa_plugin.deepspeed as hotspa
    from hotspa_plugin.integrations.megatron.gpt import build_gpt

    spec = megatron_spec(preset, config["hotspa"]["pool"])

    def build(strategy, initialize):
        return build_gpt(spec, strategy, dtype, initialize=initialize)

    engine, *_ = hotspa.initialize(model=build, config=config)
    engine.loop.switcher.poison = True
    initial, _ = engine.gather_parameters()
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        losses.append(engine.train_batch(make_batch(lengths, step)).item())
        norms.append(float(engine.get_global_grad_norm() or "nan"))
    weights, differing = engine.gather_parameters()
    return {"losses": losses, "norms": norms, "initial": initial, "weights": weights, "differing": differing}


def train_own_builder(*, config: dict[str, Any], batches: list[list[int]]) -> list[float]:
    """Losses of a model whose builder uses nothing but Megatron-core, as docs/deepspeed.md sketches it."""
    prepare()
    from hotspa_plugin.integrations.megatron import process

    process.prepare_process()
    import deepspeed
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    import hotspa_plugin.deepspeed as hotspa

    hotspa.install()

    def build(strategy, initialize):
        megatron_config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, hidden_dropout=0.0,
            tensor_model_parallel_size=strategy.tp, pipeline_model_parallel_size=strategy.pp,
            sequence_parallel=strategy.sp, pipeline_dtype=torch.float32, perform_initialization=initialize,
            gradient_accumulation_fusion=False, persist_layer_norm=False, bias_dropout_fusion=False,
        )  # fmt: skip
        return [
            GPTModel(
                config=megatron_config, transformer_layer_spec=get_gpt_layer_local_spec(),
                vocab_size=SIZES["vocab_size"], max_sequence_length=512, position_embedding_type="rope",
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
            )
        ]  # fmt: skip

    engine, *_ = deepspeed.initialize(model=build, config=config)
    return [engine.train_batch(make_batch(lengths, step)).item() for step, lengths in enumerate(batches)]


def train_megatron_reference(*, preset: str, pool: str, batches: list[list[int]], initial: dict) -> dict[str, Any]:
    """The same in one process: Megatron's own layers, sequence by sequence, torch's AdamW and clipping."""
    from hotspa_plugin.integrations.megatron import process

    process.prepare_process(on_cpu=True)
    from hotspa_plugin.data import Sample
    from hotspa_plugin.integrations.megatron.reference import Reference

    reference = Reference(megatron_spec(preset, pool))
    reference.load(initial)
    parameters = reference.parameters
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        samples = [Sample.from_tokens(tokens) for tokens in make_batch(lengths, step)]
        loss_sum, num_targets, gradients = reference.gradients(samples)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum / num_targets)
    weights = reference.gather({name: p.data for name, p in parameters.items()})
    return {"losses": losses, "norms": norms, "weights": weights}


def megatron_spec(preset: str, pool: str):
    from hotspa_plugin.config import ModelConfig
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec
    from hotspa_plugin.strategy import StrategyPool

    model = ModelConfig.model_validate({"preset": preset, "num_layers": 2, "hidden_size": 32})
    return GPTSpec.from_config(
        model, padded_vocab_size=SIZES["vocab_size"], max_positions=max(StrategyPool.parse(pool).bounds_tokens)
    )


def train_deepspeed(
    *, family: str, config: dict[str, Any], batches: list[list[int]], import_plugin: bool, sizes: dict | None = None
) -> dict[str, Any]:
    """DeepSpeed itself, data parallel over all ranks, one padded micro-batch of each rank's share per step.

    With ``import_plugin`` our module is imported before, which without a block must change nothing.
    """
    prepare()
    import deepspeed

    if import_plugin:
        import hotspa_plugin.deepspeed as hotspa

        hotspa.install()
    elif hasattr(deepspeed.initialize, "_hotspa_original"):
        import hotspa_plugin.deepspeed as hotspa

        hotspa.uninstall()
    model = make_model(family, **(sizes or {}))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = _train_data_parallel(engine, batches, lambda ids: engine(input_ids=ids, use_cache=False).logits[0])
    weights = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    return {"losses": losses, "weights": weights}


def _train_data_parallel(engine, batches: list[list[int]], logits_of) -> list[float]:
    """This rank's part of each step's mean loss; ``logits_of(ids)`` are ``[s, vocabulary]`` for ids ``[1, s]``."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step, lengths in enumerate(batches):
        mine = make_batch(lengths, step)[rank::world_size]
        num_targets = sum(length - 1 for length in lengths)
        loss = 0.0
        for tokens in mine:
            ids = torch.from_numpy(tokens)[None]
            part = torch.nn.functional.cross_entropy(logits_of(ids)[:-1].float(), ids[0, 1:], reduction="sum")
            part = part * (world_size / num_targets)
            engine.set_gradient_accumulation_boundary(tokens is mine[-1])
            engine.backward(part, scale_wrt_gas=False)
            loss += part.item()
        engine.step()
        losses.append(loss)
    return losses


def train_deepspeed_megatron(
    *, preset: str, config: dict[str, Any], pool: str, batches: list[list[int]], initial: dict
) -> dict[str, Any]:
    """Like ``train_deepspeed`` for a Megatron-core preset in bf16, from the whole weights ``initial``."""
    prepare()
    from hotspa_plugin.integrations.megatron import process

    process.prepare_process()
    import deepspeed

    from hotspa_plugin.integrations.deepspeed.groups import HomeGroups
    from hotspa_plugin.integrations.megatron.gpt import build_gpt
    from hotspa_plugin.integrations.megatron.session import ParallelStates
    from hotspa_plugin.runtime.global_view import gather_global, load_global
    from hotspa_plugin.strategy import StrategyPool

    rank, world_size = dist.get_rank(), dist.get_world_size()
    alone = StrategyPool.parse(f"tp1:{max(StrategyPool.parse(pool).bounds_tokens)}").check(world_size=world_size)
    states = ParallelStates(alone, rank=rank, world_size=world_size)
    spec = megatron_spec(preset, pool)
    with states.home.active():
        (model,) = build_gpt(spec, alone.home, torch.bfloat16, initialize=True)
        modules = states.modules(0, [model], [model])
        layout = modules.read_layout()
        load_global(layout, rank, initial, {name: p.data for name, p in modules.parameters.items()})
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config,
            mpu=HomeGroups(states.grids[0], rank, states.registry),  # Megatron's parameters make DeepSpeed ask for one
        )  # fmt: skip

        def logits_of(ids: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(ids.shape[1])[None]
            return engine(input_ids=ids, position_ids=positions, attention_mask=None)[0]

        losses = _train_data_parallel(engine, batches, logits_of)
    weights, _ = gather_global(layout, rank, {name: p.data for name, p in modules.parameters.items()})
    return {"losses": losses, "weights": weights}
