"""Installing, checking and removing hooks, on modules made here."""

import sys
import types

import pytest

from hotspa_plugin.integrations.megatron.megatron_training.hooks import Hook, HookSet, is_hooked, original_of


@pytest.fixture
def modules(monkeypatch):
    owner, user = types.ModuleType("owner_of_f"), types.ModuleType("user_of_f")
    owner.f = lambda x: x + 1
    user.f = owner.f  # as after "from owner_of_f import f"
    monkeypatch.setitem(sys.modules, "owner_of_f", owner)
    monkeypatch.setitem(sys.modules, "user_of_f", user)
    return owner, user


def hook(parameters=("x",), **changes):
    fields = {"module": "owner_of_f", "name": "f", "why": "to test", "signatures": {"0.19": parameters},
              "wrap": lambda original: lambda x: 10 * original(x)}  # fmt: skip
    return Hook(**{**fields, **changes})


def test_a_hook_reaches_every_alias_and_leaves_no_trace(modules):
    owner, user = modules
    stock = owner.f
    hooks = HookSet([hook()])
    hooks.install("0.19")
    hooks.install("0.19")
    assert owner.f(1) == user.f(1) == 20
    assert is_hooked(owner.f)
    assert original_of(owner.f) is stock
    hooks.remove()
    assert owner.f is user.f is stock


def test_only_the_owner_where_a_hook_says_so(modules):
    owner, user = modules
    hooks = HookSet([hook(everywhere=False)])
    hooks.install("0.19")
    assert (owner.f(1), user.f(1)) == (20, 2)
    hooks.remove()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (hook(parameters=("x", "y")), r"owner_of_f\.f\(x\) is not what .* expected \(x, y\)"),
        (hook(signatures={}), "no recorded signature"),
        (hook(name="g"), r"owner_of_f\.g is missing \(megatron 0\.19, supported are 0\.16 to 0\.19\)"),
        (hook(module="no_such_module"), "is missing"),
    ],
)
def test_a_moved_or_changed_function_stops_the_start(modules, wrong, said):
    owner, _ = modules
    stock = owner.f
    with pytest.raises(RuntimeError, match=said):
        HookSet([hook(), wrong]).install("0.19")
    assert owner.f is stock  # nothing was replaced, not even what fitted


def test_two_sets_of_hooks_do_not_stack(modules):
    hooks = HookSet([hook()])
    hooks.install("0.19")
    with pytest.raises(RuntimeError, match="hooked already"):
        HookSet([hook()]).install("0.19")
    hooks.remove()
