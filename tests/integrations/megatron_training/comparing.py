"""How far two runs are apart."""

import math


def relative(left, right):
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(left, right, strict=True)]


def worst_tensor(actual, expected):
    """Largest relative error of a tensor and its name; a tensor's norm counts at least 1e-7 of the whole."""
    assert actual.keys() == expected.keys()
    floor = 1e-7 * sum(t.double().square().sum().item() for t in expected.values()) ** 0.5
    errors = {
        name: (actual[name].double() - t.double()).norm().item() / max(t.double().norm().item(), floor)
        for name, t in expected.items()
    }
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def assert_same_training(hot, static):
    """Losses and gradient norms within 1e-6 in the first 5 iterations and 1e-5 in all; first gradients within 1e-5."""
    assert hot.code == static.code == 0, hot.errors
    for ours, theirs in ((hot.losses, static.losses), (hot.grad_norms, static.grad_norms)):
        errors = relative(ours, theirs)
        # One by one: max() may pass over what is not a number.
        assert all(error < 1e-6 for error in errors[:5]), errors
        assert all(error < 1e-5 for error in errors), errors
    assert worst_tensor(hot.gradients(), static.gradients())[0] < 1e-5
    assert not hot.copies
