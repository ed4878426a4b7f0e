"""Packed micro-batches through a script's own loss function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hotspa_plugin.data.micro_batch import PackedMicroBatch
from hotspa_plugin.integrations.megatron.runner import MicroBatchCursor, packed_seq_params


def loss_function_of(forward_step: Callable) -> Callable:
    """The ``loss_func(loss_mask, output[, model])`` beside a script's ``forward_step``.

    Raises ValueError where there is none.
    """
    function = inspect.unwrap(forward_step)
    while isinstance(function, functools.partial):
        function = function.func
    loss_func = getattr(function, "__globals__", {}).get("loss_func")
    if loss_func is None:
        raise ValueError(
            f"--hotspa-packing packed calls the script's loss_func(loss_mask, output) itself, but the module of "
            f"{getattr(function, '__qualname__', function)} has none: name the loss function so, or use "
            "--hotspa-packing padded"
        )
    return loss_func


def packed_forward_step(forward_step: Callable) -> Callable:
    """A forward step over packed micro-batches that ends in the loss function of the script's ``forward_step``.

    Positions, loss mask and document bounds reach every pipeline stage, since each builds its micro-batches itself.
    """
    loss_func = loss_function_of(forward_step)
    takes_model = "model" in inspect.signature(loss_func).parameters

    def step(cursor: MicroBatchCursor, model: torch.nn.Module, *unused: Any) -> tuple[torch.Tensor, Callable]:
        batch: PackedMicroBatch = next(cursor)
        output = model(
            batch.tokens, batch.position_ids, None, labels=batch.labels, packed_seq_params=packed_seq_params(batch)
        )
        options = {"model": model} if takes_model else {}
        return output, functools.partial(loss_func, batch.loss_mask, **options)

    return step
