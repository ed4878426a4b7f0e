"""The yardstick measured: the one-process reference against the model written out in plain torch."""

import pytest
import torch

from hotspa_plugin.integrations.megatron.process import prepare_process
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, make_spec

from . import plain_torch
from .checks import NARROW

LENGTHS = (7, 29, 1, 64, 33)
MODELS = {
    "tiny-llama": {},
    "tiny-gpt": {},
    "one-layer": {"preset": "tiny-llama", "num_layers": 1},
    "narrow": {**NARROW, "preset": "tiny-llama", "num_query_groups": 3, "tied_embeddings": True},
    "biased-rope": {**NARROW, "preset": "tiny-gpt", "positions": "rope", "activation": "swiglu"},
}


def compare(name, lengths):
    """(relative loss error, errors by tensor, whether documents alone add up) of the reference."""
    prepare_process(on_cpu=True)
    from hotspa_plugin.integrations.megatron.reference import Reference, tensor_errors, whole_error

    changes = MODELS[name]
    case = VerifyCase(pool="tp1:64", model=changes.get("preset", name), model_changes=changes)
    _, spec = make_spec(case, 1)
    torch.manual_seed(1)
    reference = Reference(spec)
    weights = reference.gather({n: p.data for n, p in reference.parameters.items()})
    # Norms and biases away from one and zero, so that they matter.
    weights = {n: w + 0.1 * torch.randn_like(w) if w.dim() == 1 else w for n, w in weights.items()}
    reference.load(weights)
    samples = plain_torch.random_samples(lengths, case.vocab_size)
    loss_sum, num_targets, local = reference.gradients(samples)
    whole = reference.gather(local)
    doubles = {n: w.double() for n, w in weights.items()}
    loss, expected = plain_torch.gradients(doubles, plain_torch.PlainSizes.of(spec), samples)
    alone = {n: torch.zeros_like(g) for n, g in whole.items()}
    for sample in samples:
        _, count, own = reference.gradients([sample])
        for n, g in reference.gather(own).items():
            alone[n] += g * count / num_targets
    return (
        abs(loss_sum / num_targets - loss) / loss,
        [(e.name, e.error) for e in tensor_errors(whole, expected)],
        whole_error(alone, whole),
        num_targets,
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", MODELS)
def test_reference_is_the_formula(workers, name):
    loss_error, errors, alone_error, num_targets = workers.run_reference(compare, name=name, lengths=LENGTHS)
    assert num_targets == sum(LENGTHS) - len(LENGTHS)
    assert loss_error < 1e-6
    assert errors[0][1] < 1e-5, errors[:3]
    assert alone_error < 1e-6
