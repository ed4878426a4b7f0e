"""Verification and demonstration through DeepSpeed's engine."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("megatron.core")
from hotspa_plugin.integrations.deepspeed.verify import verify_case  # noqa: E402
from hotspa_plugin.integrations.deepspeed.verify_worker import DeepSpeedVerifyCase  # noqa: E402

pytestmark = pytest.mark.gloo
LENGTHS = ((7, 65, 1, 64, 200, 30), (5, 129, 90))


@pytest.mark.parametrize(
    "case",
    [
        {"model": "hf-qwen3", "zero_stage": 1, "dtype": "bf16", "home": "tp2"},
        {"model": "hf-llama", "frozen": ("embed_tokens", "layers.0"), "packing": "padded"},
        {"model": "tiny-gpt", "zero_stage": 2, "pool": "tp1:64 pp2:128 tp2pp2:256", "home": "pp2"},
        {"model": "tiny-llama", "distributed_optimizer": True, "dtype": "bf16"},
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
