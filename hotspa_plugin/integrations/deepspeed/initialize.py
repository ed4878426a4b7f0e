"""``initialize``: DeepSpeed's own, with hot switching where the configuration has an enabled ``hotspa`` block."""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from hotspa_plugin.compatibility import check_start
from hotspa_plugin.integrations.deepspeed import auto_pool, config_block, engine_config, refusals
from hotspa_plugin.integrations.deepspeed.batches import GlobalBatchLoader
from hotspa_plugin.integrations.deepspeed.config_block import HotspaBlock
from hotspa_plugin.integrations.deepspeed.engine import HotSwitchEngine
from hotspa_plugin.integrations.deepspeed.groups import HomeGroups
from hotspa_plugin.integrations.deepspeed.home import HomeReduction, HomeWeights
from hotspa_plugin.integrations.deepspeed.host import HostModule
from hotspa_plugin.integrations.deepspeed.memory import check_memory, resident_memory
from hotspa_plugin.integrations.deepspeed.model_family import ModelFamily, open_family
from hotspa_plugin.integrations.deepspeed.optimizer_binding import bind_groups, bind_optimizer
from hotspa_plugin.runtime.agreement import check_agreement
from hotspa_plugin.runtime.memory import rank_memory_bytes
from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder

_MARK = "_hotspa_original"
_original_initialize = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    recorder: RunRecorder | NullRecorder | None = None,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, honouring an enabled ``hotspa`` block of the configuration.

    Without such a block the call is passed on as it is. With one, ``model`` is a Hugging Face causal language
    model, or its configuration (then initialised from the current seed), or a builder for Megatron-core models,
    ``build(strategy, initialize) -> [model chunks]``, called once per strategy while its groups are in place.
    ``training_data`` becomes a loader of global batches. Returns (engine, optimizer, data loader, lr scheduler).

    Raises ValueError, before any training, for what cannot be switched exactly, naming the setting.
    """
    given = config if config is not None else config_params
    if given is None and args is not None:
        given = getattr(args, "deepspeed_config", None)
    passed_on = {
        "args": args, "model": model, "optimizer": optimizer, "model_parameters": model_parameters,
        "training_data": training_data, "lr_scheduler": lr_scheduler, "mpu": mpu,
        "dist_init_required": dist_init_required, "collate_fn": collate_fn, "config": config,
        "mesh_param": mesh_param, "config_params": config_params,
    }  # fmt: skip
    if distributed_port is not None:
        passed_on["distributed_port"] = distributed_port
    loaded = _load_if_readable(given)
    block = config_block.read_block(loaded) if loaded is not None else None
    if block is None:
        return _original_initialize(**passed_on)
    check_start({"torch": torch.__version__, "deepspeed": deepspeed.__version__})
    if problems := refusals.find_problems(loaded):
        raise ValueError("hotspa cannot run with " + "; ".join(problems))
    _refuse_arguments(model=model, mpu=mpu, mesh_param=mesh_param, collate_fn=collate_fn)
    if optimizer is None and not loaded.get("optimizer"):
        raise ValueError("initialize: there is no optimizer: write an optimizer block, or pass optimizer")
    if not dist.is_initialized():
        deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    return _initialize(
        loaded, block, model, optimizer=optimizer, model_parameters=model_parameters, training_data=training_data,
        lr_scheduler=lr_scheduler, recorder=recorder or NullRecorder(),
    )  # fmt: skip


def install() -> None:
    """Makes ``deepspeed.initialize`` this module's; harmless when called again. ``uninstall`` undoes it."""
    if hasattr(deepspeed.initialize, _MARK):
        return
    setattr(initialize, _MARK, _original_initialize)
    deepspeed.initialize = initialize


def uninstall() -> None:
    """Puts DeepSpeed's own ``initialize`` back."""
    deepspeed.initialize = getattr(deepspeed.initialize, _MARK, deepspeed.initialize)


def _load_if_readable(given: Any) -> dict[str, Any] | None:
    """The configuration as a dict (from a mapping, a path or base64 text, as DeepSpeed takes it).

    None where it cannot be read: then DeepSpeed says so.
    """
    try:
        if isinstance(given, (Mapping, os.PathLike)):
            return config_block.load_config(given)
        if isinstance(given, str):
            if os.path.exists(given):
                return config_block.load_config(given)
            decoded = json.loads(base64.urlsafe_b64decode(given))
            return decoded if isinstance(decoded, dict) else None
    except ValueError:
        pass
    return None


def _refuse_arguments(*, model: Any, mpu: Any, mesh_param: Any, collate_fn: Any) -> None:
    if model is None:
        raise ValueError("initialize: model is missing")
    if isinstance(model, deepspeed.PipelineModule):
        raise ValueError(
            "initialize: model is a PipelineModule (PipelineEngine), which hotspa cannot switch: pass the plain "
            "model; strategies with pp > 1 need a Megatron-core model builder"
        )
    for name, value in {"mpu": mpu, "mesh_param": mesh_param}.items():
        if value is not None:
            raise ValueError(
                f"initialize: {name} is given, but hotspa makes the groups of all strategies itself: leave it out"
            )
    if collate_fn is not None:
        raise ValueError("initialize: collate_fn is given, but hotspa lays out the sequences itself: leave it out")


def _initialize(
    config: dict[str, Any],
    block: HotspaBlock,
    model: Any,
    *,
    optimizer: Any,
    model_parameters: Any,
    training_data: Any,
    lr_scheduler: Any,
    recorder: RunRecorder | NullRecorder,
) -> tuple[Any, Any, Any, Any]:
    if training_data is not None and block.batch != "global":
        raise ValueError(f"{config_block.KEY}.batch: training_data is made into global batches, so it must be global")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device(get_accelerator().current_device_name())
    dtype, stage = engine_config.compute_dtype(config), engine_config.zero_stage(config)
    check_agreement("the hotspa block", block.model_dump_json(), device=device)
    block, assigner, why = auto_pool.choose(
        block, model, training_data, world_size=world_size, distributed=stage >= 1,
        num_sequences=engine_config.train_batch_size(config, world_size),
    )  # fmt: skip
    pool = block.parse_pool()
    check_agreement("the pool", pool.digest(), device=device)
    try:
        pool = pool.check(world_size=world_size)
        family: ModelFamily = open_family(model, pool, block, dtype=dtype, device=device)
    except ValueError as error:
        if str(error).startswith(("strategy ", "pool: ")):
            raise ValueError(f"{config_block.KEY}.pool: {str(error).removeprefix('pool: ')}") from None
        raise
    pool = family.pool
    needed = functools.partial(
        resident_memory,
        home=str(pool.home), home_dp=pool.home.dp, zero_stage=stage, optimizer=_optimizer_name(optimizer, config),
        item_size_bytes=dtype.itemsize, staging_bytes=block.switch.memory_budget_bytes or 0,
    )  # fmt: skip
    available_bytes = rank_memory_bytes(int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    check_memory(needed(family.layouts()), available_bytes)
    settings = engine_config.engine_config(config, home_dp=pool.home.dp, world_size=world_size)

    host = HostModule(family.home_values(), family.trainable)
    grid = family.home_grid
    reduction = HomeReduction(family.home_layout, grid, rank, family.registry)
    reduction.mark(host)
    by_name = dict(host.named_parameters())
    own = family.user_parameters()
    if isinstance(optimizer, torch.optim.Optimizer):
        refusals.check_optimizer(optimizer)
        optimizer = bind_optimizer(optimizer, own, by_name)
    bound = bind_groups(model_parameters, own, by_name)
    engine, engine_optimizer, _, scheduler = _original_initialize(
        model=host,
        optimizer=optimizer,
        model_parameters=bound if bound is not None else [p for p in host.parameters() if p.requires_grad],
        lr_scheduler=lr_scheduler,
        mpu=HomeGroups(grid, rank, family.registry),
        config=settings,
    )
    weights = HomeWeights(host, dtype=dtype, partitioned=stage == 3, device=device)
    loop = family.build_loop(weights, recorder=recorder)
    check_memory(needed(family.layouts()), available_bytes)
    loop.assigner = assigner
    loader = None
    if training_data is not None:
        loader = GlobalBatchLoader(
            training_data, num_sequences=engine_config.train_batch_size(config, world_size), seed=block.seed
        )
    switching = HotSwitchEngine(
        engine=engine, block=block, loop=loop, weights=weights, reduction=reduction, family=family, loader=loader,
        device=device,
    )  # fmt: skip
    precision = {torch.float32: "fp32", torch.bfloat16: "bf16 with fp32 masters"}[dtype]
    _announce(
        f"hotspa is active: pool {pool}, home {pool.home}, {block.packing} micro-batches, {precision}, ZeRO {stage}"
    )
    if why is not None:
        _announce(f"hotspa: pool auto: {why}")
    if stage >= 2:
        _announce(
            f"hotspa: home's weights and gradients stay whole, so ZeRO {stage} saves little more than ZeRO 1 here"
        )
    return switching, engine_optimizer, loader, scheduler


def _optimizer_name(optimizer: Any, config: Mapping[str, Any]) -> str:
    if optimizer is None:
        return str((config.get("optimizer") or {}).get("type", ""))
    return type(optimizer).__name__ if isinstance(optimizer, torch.optim.Optimizer) else ""


def _announce(line: str) -> None:
    """Prints on rank 0, unless DeepSpeed was told to be quiet; its own info lines are not shown by default."""
    if dist.get_rank() == 0 and logger.isEnabledFor(logging.WARNING):
        print(line, flush=True)
