"""Whether a gradient that misses the bound does so because fp32 itself cannot tell it.

Random models have tensors whose gradient is what is left after much larger parts have cancelled: the bias of a key
norm, say, which softmax hardly sees. There one process in fp32 is as far from the truth as any other order of
additions, and so is a static run, in which nothing is switched. The truth is one process in fp64.

In the case that is kept among the tests the bias of one key norm is off by 2.4e-5 of its norm, under hot switching as
in the static run. Its *absolute* error, 8e-10, is that of the other norms of the model (5e-10 to 2e-9), whose gradients
are 20 to 100 times as large: what is small is what was left of the sum, not the care with which it was added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hotspa_plugin.data import Sample
from hotspa_plugin.integrations.megatron.reference import Reference, tensor_errors

FACTOR = 2.0  # hot switching may be so many times as far from fp64 as runs without it are, as for bf16
Tensors = Mapping[str, torch.Tensor]


def ill_conditioned(hot: Tensors, unswitched: Sequence[Tensors], true: Tensors) -> set[str]:
    """Names of tensors in which ``hot`` is as close to ``true`` as the farthest of ``unswitched``, up to ``FACTOR``."""
    others = [{error.name: error.error for error in tensor_errors(one, true)} for one in unswitched]
    return {
        error.name
        for error in tensor_errors(hot, true)
        if error.error <= FACTOR * max(other[error.name] for other in others)
    }


def true_gradients(reference: Reference, parameters: Tensors, samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Whole fp64 gradients of the mean loss over all target tokens; ``reference`` was built in fp64."""
    reference.load({name: value.double() for name, value in parameters.items()})
    sums = {name: torch.zeros_like(p) for name, p in reference.parameters.items()}
    num_targets = 0
    for sample in samples:
        tokens, labels = (torch.from_numpy(array)[None] for array in (sample.tokens, sample.labels))
        mask = torch.from_numpy(sample.loss_mask)
        # Megatron's own cross entropy computes in fp32.
        logits = reference.model(tokens, torch.arange(len(sample))[None], None)
        losses = torch.nn.functional.cross_entropy(logits[0].double(), labels[0], reduction="none")
        (losses * mask).sum().backward()
        num_targets += int(mask.sum())
        for name, parameter in reference.parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
                parameter.grad = None
    return reference.gather({name: total / max(num_targets, 1) for name, total in sums.items()})
