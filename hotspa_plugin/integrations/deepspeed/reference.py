"""The same batch in one process: a whole Hugging Face model, one sequence at a time, with transformers' attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hotspa_plugin.data import Sample


def gradients(model: torch.nn.Module, samples: Sequence[Sample]) -> tuple[float, int, dict[str, torch.Tensor]]:
    """(loss sum, target tokens, fp32 gradient of loss sum / target tokens by parameter name).

    It shares nothing with hot switching: no packing, no plan, no slab, no attention of ours.
    """
    num_targets = int(sum(sample.loss_mask.sum() for sample in samples))
    loss_sum = 0.0
    model.zero_grad()
    for sample in samples:
        logits = model(input_ids=torch.from_numpy(sample.tokens)[None], use_cache=False).logits[0]
        losses = torch.nn.functional.cross_entropy(logits.float(), torch.from_numpy(sample.labels), reduction="none")
        loss = (losses * torch.from_numpy(sample.loss_mask)).sum()
        loss.backward()
        loss_sum += loss.item()
    found = {
        name: parameter.grad.float() / max(num_targets, 1)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return loss_sum, num_targets, found
