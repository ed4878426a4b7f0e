"""The same batch in one process: stock Megatron modules, one sequence at a time, no packing, no schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from hotspa_plugin.data import Sample
from hotspa_plugin.integrations.megatron import random_state
from hotspa_plugin.integrations.megatron.gpt import GPTSpec, transformer_config
from hotspa_plugin.integrations.megatron.layout_reader import named_parameters, read_rank
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.runtime.global_view import load_global, shard_view
from hotspa_plugin.runtime.layout_gathering import gather_layout
from hotspa_plugin.runtime.tensor_error import tensor_errors, whole_error
from hotspa_plugin.strategy import ParallelStrategy

__all__ = ["Reference", "tensor_errors", "whole_error"]


class Reference:
    """A model in a world of one rank, and the gradient of any batch by plain backward passes.

    It shares nothing with hot switching but the model's sizes: Megatron's local layers, its own attention and
    norms, each sequence alone as ``[1, n]``. Gradients accumulate in ``dtype``'s parameters' own ``grad``
    converted to fp32 after each sequence.
    """

    def __init__(self, spec: GPTSpec, dtype: torch.dtype = torch.float32) -> None:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        random_state.prepare()
        strategy = ParallelStrategy().resolve(1)
        config = transformer_config(spec, strategy, dtype)
        self.model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                qk_layernorm=spec.qk_layernorm, normalization=config.normalization
            ),
            vocab_size=spec.padded_vocab_size,
            max_sequence_length=spec.max_positions,
            share_embeddings_and_output_weights=spec.tied_embeddings,
            position_embedding_type={"rope": "rope", "learned": "learned_absolute"}[spec.positions],
            rotary_base=spec.rotary_base,
        ).to(dtype)
        self._parameters = named_parameters([self.model])
        self._layout: ShardLayout = gather_layout("reference", read_rank([self.model], config, 0), 0)

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets all parameters from whole tensors by name."""
        load_global(self._layout, 0, values, {name: p.data for name, p in self._parameters.items()})

    def gather(self, local: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors by name from tensors shaped like this model's parameters, by parameter name."""
        whole: dict[str, torch.Tensor] = {}
        for shard in self._layout.shards(0):
            if shard.parameter not in local:
                continue
            spec = self._layout.tensors[shard.tensor]
            view = shard_view(local[shard.parameter], shard)
            target = whole.setdefault(spec.name, torch.empty(spec.shape, dtype=view.dtype))
            index = tuple(slice(low, high) for low, high in zip(shard.region.low, shard.region.high, strict=True))
            target[index] = view
        return whole

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._parameters

    def gradients(self, samples: Sequence[Sample]) -> tuple[float, int, dict[str, torch.Tensor]]:
        """(loss sum, target tokens, fp32 gradient of loss sum / target tokens by parameter name)."""
        sums = {name: torch.zeros(p.shape, dtype=torch.float32) for name, p in self._parameters.items()}
        loss_sum, num_targets = 0.0, 0
        for sample in samples:
            loss_mask = torch.from_numpy(sample.loss_mask)
            losses = self.model(
                torch.from_numpy(sample.tokens)[None],
                torch.arange(len(sample))[None],
                None,
                labels=torch.from_numpy(sample.labels)[None],
            )
            loss = (losses.float().view(-1) * loss_mask).sum()
            loss.backward()
            loss_sum += loss.item()
            num_targets += int(loss_mask.sum())
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad.float()
                    parameter.grad = None
        return loss_sum, num_targets, {name: total / max(num_targets, 1) for name, total in sums.items()}
