"""How far two runs are apart."""


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
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def assert_same_training(hot, static):
    """Losses and gradient norms within 1e-6 in the first 5 iterations and 1e-5 in all; first gradients within 1e-5."""
    assert hot.code == static.code == 0, hot.errors
    assert max(relative(hot.losses, static.losses)[:5]) < 1e-6
    assert max(relative(hot.grad_norms, static.grad_norms)[:5]) < 1e-6
    assert max(relative(hot.losses, static.losses)) < 1e-5
    assert max(relative(hot.grad_norms, static.grad_norms)) < 1e-5
    assert worst_tensor(hot.gradients(), static.gradients())[0] < 1e-5
    assert not hot.copies
