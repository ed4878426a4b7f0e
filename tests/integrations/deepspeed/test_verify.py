"""Verification and demonstration through DeepSpeed's engine."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("megatron.core")
from hotspa_plugin.integrations.deepspeed.model_checks import EXACT_FAMILIES  # noqa: E402
from hotspa_plugin.integrations.deepspeed.verify import verify_case  # noqa: E402
from hotspa_plugin.integrations.deepspeed.verify_worker import DeepSpeedVerifyCase  # noqa: E402
from hotspa_plugin.integrations.megatron.verify import verify_case as verify_megatron_case  # noqa: E402
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase  # noqa: E402

pytestmark = pytest.mark.gloo
LENGTHS = ((7, 65, 1, 64, 200, 30), (5, 129, 90))


@pytest.mark.parametrize(
    "case",
    [
        {"model": "hf-qwen3", "zero_stage": 1, "dtype": "bf16", "home": "tp2"},
        pytest.param(
            {"model": "hf-llama", "frozen": ("embed_tokens", "layers.0"), "packing": "padded"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"model": "tiny-gpt", "zero_stage": 2, "pool": "tp1:64 pp2:128 tp2pp2:256", "home": "pp2"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"model": "tiny-llama", "distributed_optimizer": True, "dtype": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_verify_finds_it_exact(workers, case):
    case = DeepSpeedVerifyCase(**{"pool": "tp1:64 tp2:128 tp4:256", "lengths": LENGTHS, **case})
    result = verify_case(workers, case)
    assert result["problems"] == [] and result["exact"]
    assert result["sequences_trained"] == 9 and result["target_tokens"] == 7 + 65 + 1 + 64 + 200 + 30 + 5 + 129 + 90 - 9
    assert result["num_process_groups_at_end"] == result["num_process_groups_after_start"]
    json.dumps(result)


@pytest.mark.slow
@pytest.mark.parametrize("family", EXACT_FAMILIES)
def test_families_that_are_called_exact_are(workers, family):
    case = DeepSpeedVerifyCase(
        model=f"hf-{family}", pool="tp1:64 tp2:128 tp4:256", home="tp2", lengths=LENGTHS[:1], distributed_optimizer=True
    )
    result = verify_case(workers, case)
    assert result["problems"] == [] and result["exact"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [256, 254])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tied_embeddings_and_vocabularies_that_do_not_divide(workers, family, vocab_size, tied):
    case = DeepSpeedVerifyCase(
        model=f"hf-{family}", model_changes={"tie_word_embeddings": tied}, vocab_size=vocab_size,
        pool="tp1:64 tp2:128 tp4:256", home="tp4", lengths=LENGTHS[:1],
    )  # fmt: skip
    result = verify_case(workers, case)
    assert result["problems"] == [] and result["exact"]


def test_report_has_the_keys_of_megatrons(workers):
    """The same question gives the same JSON, whichever engine was asked."""
    case = {"model": "tiny-gpt", "pool": "tp1:64 tp2:256", "lengths": LENGTHS[1:], "dtype": "bf16"}
    ours = verify_case(workers, DeepSpeedVerifyCase(**case))
    theirs = verify_megatron_case(workers, VerifyCase(**case))
    assert ours["exact"] and theirs["exact"]
    assert shape_of(ours) == shape_of(theirs)


def shape_of(value: object) -> object:
    """Keys and kinds of a JSON value; of a list, those of its items. Names of tensors are values, too."""
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape_of(item) for item in value[:1]]
    return type(value).__name__


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    from hotspa_plugin.config import TrainingConfig
    from hotspa_plugin.integrations.deepspeed.demo import run_demo

    config = TrainingConfig.model_validate({
        "pool": "tp1:256 tp2pp2:1024", "data": {"global_batch_sequences": 8},
        "run": {"steps": 3, "out": str(tmp_path / "run"), "device": "cpu"},
    })  # fmt: skip
    comparison = run_demo(config, num_ranks=4)
    hot, static = comparison.runs
    assert hot.losses == pytest.approx(static.losses, abs=1e-4)
    assert (tmp_path / "run" / "comparison.json").exists()
