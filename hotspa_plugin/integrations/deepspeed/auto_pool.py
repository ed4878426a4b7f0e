"""``"pool": "auto"`` and ``"assignment": "batch"`` in the ``hotspa`` block: planned before anything is built."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from hotspa_plugin.cost import Profile, read_profile
from hotspa_plugin.integrations.deepspeed.config_block import KEY, HotspaBlock
from hotspa_plugin.integrations.deepspeed.model_checks import check_strategy
from hotspa_plugin.runtime.memory import return_freed_memory
from hotspa_plugin.search import BatchAssigner, LengthSource, StepModel, assigner_for, choose_pool, draw_from
from hotspa_plugin.strategy import ParallelStrategy

NUM_DRAWN = 1 << 14
# A profile's sizes and what transformers calls them.
_HUGGING_FACE_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
}


def choose(
    block: HotspaBlock, model: Any, training_data: Any, *, world_size: int, num_sequences: int, distributed: bool
) -> tuple[HotspaBlock, BatchAssigner | None, str | None]:
    """(the block with the pool that ``auto`` stands for, what assigns batches or None for the bounds, why this pool).

    The same on all ranks. ValueError naming the JSON key.
    """
    if not block.is_planned:
        return block, None, None
    if not torch.cuda.is_available():
        return_freed_memory()
    profile = _profile(block, model, world_size).with_distributed_optimizer(distributed)
    limit = None if block.memory_limit_gb is None else round(block.memory_limit_gb * 1e9)
    if not block.is_auto:
        pool, packing = block.parse_pool(), block.packing
        assigner = assigner_for(profile, pool, num_ranks=world_size, memory_limit_bytes=limit, packing=packing)
        return block, assigner, None
    lengths = _lengths(block, training_data)
    longest = block.longest_tokens or int(lengths.max())
    chosen = choose_pool(
        StepModel(profile, num_ranks=world_size, memory_limit_bytes=limit),
        draw_from(np.minimum(lengths, longest), num_sequences=num_sequences),
        longest_tokens=longest,
        per_batch=block.assigns_per_batch,
        packing=block.packing,
    )
    planned = {"pool": str(chosen.pool), "home": str(chosen.pool.home), "micro_batch_tokens": chosen.micro_batch_tokens}
    return block.model_copy(update=planned), chosen.assigner if block.assigns_per_batch else None, chosen.why


def _profile(block: HotspaBlock, model: Any, world_size: int) -> Profile:
    profile = read_profile(block.profile)
    profile.check_ranks(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    config = model if isinstance(model, PretrainedConfig) else getattr(model, "config", None)
    if not isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return profile  # a builder of Megatron-core models does not tell its sizes
    for ours, theirs in _HUGGING_FACE_SIZES.items():
        measured, given = getattr(profile.model, ours), getattr(config, theirs, None)
        if given is not None and measured != given:
            raise ValueError(
                f"{KEY}.profile {block.profile} is of another model: its {ours} is {measured}, the model's {theirs} "
                f"is {given}"
            )
    stages = []
    for stage in profile.stages:
        try:
            # of a mere configuration only pipelines are known not to fit
            check_strategy(model, stage.strategy if config is not model else ParallelStrategy(pp=stage.pp))
        except ValueError:
            continue
        stages.append(stage)
    if not stages:
        raise ValueError(f"{KEY}.profile {block.profile} has no strategy that fits a Hugging Face model")
    return profile.model_copy(update={"stages": tuple(stages)})


def _lengths(block: HotspaBlock, training_data: Any) -> np.ndarray:
    """Tokens of sequences like those to come."""
    if block.lengths is not None:
        return LengthSource.open(block.lengths).draw(NUM_DRAWN, seed=block.seed)
    if training_data is None:
        raise ValueError(
            f"{KEY}.lengths is missing: pool auto must know how long sequences are, so give wikipedia, a file with one "
            "length a line, or a JSON histogram; or pass training_data to initialize"
        )
    count = len(training_data)
    chosen = np.random.RandomState(block.seed % 2**32).permutation(count)[:NUM_DRAWN]
    return np.array([_length(training_data[int(index)]) for index in chosen], dtype=np.int64)


def _length(item: Any) -> int:
    return len(item["input_ids"] if hasattr(item, "keys") else item)
