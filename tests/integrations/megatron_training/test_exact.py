"""Hot switching in the real training loop against stock Megatron on the same documents, number by number."""

import pytest


pytestmark = pytest.mark.gloo

POOL = "--hotspa-sample-unit sample --hotspa-pool 'tp1:16 tp2:48 tp4:128'"


def relative(left, right):
    return [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(left, right, strict=True)]


def worst_tensor(actual, expected):
    """Largest relative error of a tensor, its norm counting at least 1e-7 of the whole."""
    assert actual.keys() == expected.keys()
    floor = 1e-7 * sum(t.double().square().sum().item() for t in expected.values()) ** 0.5
    errors = {
        name: (actual[name].double() - t.double()).norm().item() / max(t.double().norm().item(), floor)
        for name, t in expected.items()
    }
    worst = max(errors, key=errors.get)
    return errors[worst], worst


def assert_same_training(hot, static):
    assert hot.code == static.code == 0, hot.errors
    assert len(hot.losses) == len(static.losses)
    assert max(relative(hot.losses, static.losses)[:5]) < 1e-6
    assert max(relative(hot.grad_norms, static.grad_norms)[:5]) < 1e-6
    assert max(relative(hot.losses, static.losses)) < 1e-5
    assert max(relative(hot.grad_norms, static.grad_norms)) < 1e-5
    assert worst_tensor(hot.gradients(), static.gradients())[0] < 1e-5
    assert not hot.copies


@pytest.fixture(scope="module")
def static_tp4(pretrain_once):
    return pretrain_once("--tensor-model-parallel-size 4", iterations=20)


@pytest.fixture(scope="module")
def static_dp4(pretrain_once, static_tp4):
    return pretrain_once("", iterations=20)


def test_three_strategies_train_like_each_static_one(pretrain, static_tp4, static_dp4):
    hot = pretrain(f"--tensor-model-parallel-size 4 {POOL}", iterations=20)
    assert_same_training(hot, static_tp4)
    assert_same_training(hot, static_dp4)
    print("loss", max(relative(hot.losses, static_dp4.losses)), "norm", max(relative(hot.grad_norms, static_dp4.grad_norms)),
          "gradient", worst_tensor(hot.gradients(), static_dp4.gradients()), "noise",
          worst_tensor(static_tp4.gradients(), static_dp4.gradients()),
          max(relative(static_tp4.losses, static_dp4.losses)), max(relative(static_tp4.grad_norms, static_dp4.grad_norms)))
