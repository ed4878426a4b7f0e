"""Home's overlapped communication (``overlap_grad_reduce``, ``overlap_param_gather``) around the buckets.

Megatron starts reducing a gradient as soon as home's last micro-batch has produced it, and gathers a parameter when
home's forward pass first needs it. Other strategies read parameters before and add gradients before that, so parameters
are gathered first, and gradients are reduced last: home's bucket runs after all flushes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_parameters(chunks: Sequence[torch.nn.Module]) -> None:
    """Completes home's parameters now where the last optimizer step left that to forward hooks."""
    for chunk in chunks:
        # The hooks are off in the first iteration and around evaluation, when parameters are complete.
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            chunk.start_param_sync(force_sync=True)


def start_missing_reductions(chunks: Sequence[torch.nn.Module]) -> None:
    """Starts the gradient reductions that home's backward pass would have started, had this rank run any.

    Its data-parallel peers may have run home micro-batches and wait for it.
    """
    for chunk in chunks:
        if not chunk.ddp_config.overlap_grad_reduce:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            # In its first batch Megatron starts the reduction when it finishes gradients.
            if not group.is_first_batch and group.grad_reduce_handle is None and not _finished(group):
                group.start_grad_sync()


def _finished(group: object) -> bool:
    # Absent before megatron-core 0.18, where no reduction ends before gradients are finished.
    return getattr(group, "grad_reduce_finished", False)
