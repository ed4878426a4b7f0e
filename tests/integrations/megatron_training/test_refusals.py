"""What is refused by name before Megatron validates its arguments; no ranks needed."""

import argparse

import pytest

pytest.importorskip("megatron.core")
from hotspa_plugin.integrations.megatron.megatron_training import refusals
from hotspa_plugin.strategy import StrategyPool  # noqa: E402

POOL = StrategyPool.parse("tp1:16 tp4:128")


def arguments(**changes):
    plain = {"switch_memory_mb": None, "timeout_s": None, "check_every": 0, "mock_lengths": None, "overlong": "error",
             "sample_unit": "document"}  # fmt: skip
    hot = {f"hotspa_{name}": value for name, value in plain.items()}
    return argparse.Namespace(**{**hot, "mock_data": False, "seq_length": 128, **changes})


def test_a_plain_script_is_not_refused():
    refusals.refuse_unsupported(
        arguments(dataloader_type="single", cuda_graph_impl="none", context_parallel_size=1), POOL
    )


@pytest.mark.parametrize("refusal", refusals.REFUSALS, ids=lambda refusal: refusal.argument)
def test_each_unsupported_flag_is_named_with_what_to_do_instead(refusal):
    value = next(value for value in (True, 2, "cyclic") if refusal.given(value))
    with pytest.raises(ValueError, match="does not go together with --hotspa-pool") as refused:
        refusals.refuse_unsupported(arguments(**{refusal.argument: value}), POOL)
    assert str(refused.value).startswith(refusal.flag + " ")
    assert refusal.instead in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hotspa_switch_memory_mb": 0}, "--hotspa-switch-memory-mb 0: must be at least 1"),
        ({"hotspa_timeout_s": 0.5}, "--hotspa-timeout-s 0.5: must be at least 1"),
        ({"hotspa_check_every": -1}, "--hotspa-check-every -1: must be at least 0"),
        ({"hotspa_mock_lengths": "wikipedia"}, "--hotspa-mock-lengths is for random data: add --mock-data"),
        ({"hotspa_sample_unit": "sample", "seq_length": 256}, "--seq-length 256 can be longer than the last bound"),
    ],
)
def test_wrong_values_of_our_own_flags_are_named(changes, said):
    with pytest.raises(ValueError, match="--") as refused:
        refusals.refuse_unsupported(arguments(**changes), POOL)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["home", "switch_memory_mb", "report_dir", "timeout_s", "mock_lengths", "check_every"])
def test_flags_without_a_pool_are_refused(name):
    flag = "--hotspa-" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} means nothing without --hotspa-pool"):
        refusals.refuse_without_pool(argparse.Namespace(**{f"hotspa_{name}": "1"}))


def test_gradients_averaged_over_tensor_parallel_are_refused():
    import torch

    from hotspa_plugin.integrations.megatron.gradient_class import gradient_class

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.average_gradients_across_tp_domain = True
    with pytest.raises(
        ValueError, match=r"parameter router\.weight .*average_gradients_across_tp_domain.*turn that off"
    ):
        gradient_class("router.weight", parameter, argparse.Namespace(sequence_parallel=False, qk_layernorm=False))
