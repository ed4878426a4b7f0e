"""The modules that run one strategy's buckets: home's, wrapped for training, and the others', bare."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from hotspa_plugin.integrations.megatron import layout_reader, parallel_state
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.runtime.layout_gathering import gather_layout
from hotspa_plugin.topology import Coordinate

Surroundings = Callable[[], contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyModules:
    """This rank's model chunks under one strategy, with its group set and its place in the grid.

    ``chunks`` are what the schedule runs (home's wrapped in DDP, half-precision ones in ``Float16Module``);
    ``bare_chunks`` the models inside. ``surroundings`` makes what is entered around all that this strategy does.
    """

    label: str
    state: parallel_state.ParallelState
    coordinate: Coordinate
    chunks: Sequence[torch.nn.Module]
    bare_chunks: Sequence[MegatronModule]
    config: TransformerConfig
    surroundings: Surroundings = contextlib.nullcontext

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return layout_reader.named_parameters(self.bare_chunks)

    def read_layout(self) -> ShardLayout:
        """The layout of all ranks; collective over the world."""
        with self.state.active(), self.surroundings():
            shards = layout_reader.read_rank(self.bare_chunks, self.config, self.coordinate.dp)
        return gather_layout(self.label, shards, self.coordinate.dp)

    def run(
        self,
        forward_step_func: Callable,
        data_iterator: Any,
        *,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        **schedule_options: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Megatron's own schedule over ``num_microbatches`` >= 1 micro-batches, without finishing gradients.

        Returns what the loss function reported for each micro-batch (on the last stage; empty elsewhere).
        """
        for chunk in self.bare_chunks:
            if chunk.training == forward_only:
                chunk.train(not forward_only)
        with self.state.active(), self.surroundings(), _deferred_finalize(self.config):
            return get_forward_backward_func()(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=list(self.chunks),
                num_microbatches=num_microbatches,
                seq_length=seq_length,
                micro_batch_size=micro_batch_size,
                forward_only=forward_only,
                **schedule_options,
            )


class _deferred_finalize:
    """Keeps a schedule from finishing gradients: one finalize at the end of the step does that for all buckets."""

    def __init__(self, config: TransformerConfig) -> None:
        self._config = config

    def __enter__(self) -> None:
        self._finalize = self._config.finalize_model_grads_func
        self._config.finalize_model_grads_func = None

    def __exit__(self, *exc_info: object) -> None:
        self._config.finalize_model_grads_func = self._finalize


def attach_gradient(parameter: torch.nn.Parameter, accumulator: torch.Tensor) -> None:
    """Makes every backward pass add ``parameter``'s gradient into ``accumulator``, in its dtype.

    This is what Megatron's DistributedDataParallel does with its own buffers, its flags honoured: a fused
    kernel may have added already, and a tied weight may need the addition all the same.
    """
    parameter.main_grad = accumulator
    parameter.grad_added_to_main_grad = False

    def accumulate(parameter: torch.nn.Parameter) -> None:
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)
