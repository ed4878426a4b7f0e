"""The hotspa block: what is read, what is refused, and how; and what doctor says. No ranks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hotspa_plugin
from hotspa_plugin.integrations.deepspeed import engine_config, refusals
from hotspa_plugin.integrations.deepspeed.config_block import load_config, read_block
from hotspa_plugin.integrations.deepspeed.doctor import examine_config

GOOD = {"pool": "tp1:64 tp2:128"}


def test_block_with_all_keys():
    block = read_block({"hotspa": {
        "enabled": True, "pool": {"tp1": 64, "tp2": 128}, "home": "tp1", "packing": "padded", "batch": "per_rank",
        "micro_batch_tokens": {"tp1": 256}, "switch": {"policy": "greedy", "memory_mb": 0.5}, "seed": 3,
    }})  # fmt: skip
    assert str(block.parse_pool()) == "tp1:64 tp2:128" and str(block.parse_pool().home) == "tp1"
    assert block.switch.memory_budget_bytes == 2**19


@pytest.mark.parametrize("config", [{}, {"hotspa": None}, {"hotspa": {"enabled": False, "anything": 1}}])
def test_absent_or_disabled(config):
    assert read_block(config) is None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (True, r"hotspa is true, but must be a block"),
        ({}, r"hotspa\.pool is missing"),
        ({**GOOD, "packng": "padded"}, r"hotspa\.packng is not a known key; did you mean 'packing'\?"),
        ({**GOOD, "xyz": 1}, r"hotspa\.xyz is not a known key; known are enabled, pool"),
        (
            {**GOOD, "switch": {"memory_md": 5}},
            r"hotspa\.switch\.memory_md is not a known key; did you mean 'memory_mb'",
        ),
        ({**GOOD, "switch": {"memory_mb": -5}}, r"hotspa\.switch\.memory_mb is -5"),
        ({**GOOD, "enabled": "yes"}, r"hotspa\.enabled is \"yes\": Input should be a valid boolean"),
        ({**GOOD, "packing": "dense"}, r"hotspa\.packing is \"dense\""),
        ({"pool": 5}, r"hotspa\.pool: 5 is neither text, list nor mapping"),
        ({"pool": None}, r"hotspa\.pool: None is neither"),
        ({"pool": ""}, r"hotspa\.pool: it has no entry"),
        ({"pool": {"tp1": "64"}}, r"hotspa\.pool: entry 1: bound_tokens: .* \(got '64'\)"),
        ({"pool": {"tp1": True}}, r"hotspa\.pool: entry 1: bound_tokens: .* \(got True\)"),
        ({**GOOD, "home": 2}, r"hotspa\.home is 2: Input should be a valid string"),
        ({**GOOD, "home": ""}, r"hotspa\.pool: home: "),
        ({**GOOD, "switch": []}, r"hotspa\.switch is \[\]"),
        ({**GOOD, "switch": {"policy": "best"}}, r"hotspa\.switch\.policy is \"best\": .*'balanced'"),
        ({**GOOD, "switch": {"memory_mb": float("inf")}}, r"hotspa\.switch\.memory_mb is Infinity"),
        ({**GOOD, "switch": {"memory_mb": "512"}}, r"hotspa\.switch\.memory_mb is \"512\""),
        ({**GOOD, "overlong": "cut"}, r"hotspa\.overlong is \"cut\": .*'truncate'"),
        ({**GOOD, "seed": -1}, r"hotspa\.seed is -1"),
        ({**GOOD, "seed": 1.5}, r"hotspa\.seed is 1\.5"),
        ({**GOOD, "micro_batch_tokens": {"tp1": 63}}, r"hotspa\.micro_batch_tokens: 63 of tp1 .* its bound, 64"),
        ({"pool": "tp1:64 xp2:128"}, r"hotspa\.pool: entry at character 8: strategy 'xp2': 'xp2' at character 1"),
        ({"pool": "tp1:64 tp2:32"}, r"hotspa\.pool: bound 32 of tp2 is not above"),
        ({**GOOD, "home": "tp4"}, r"hotspa\.pool: home tp4 is not in it"),
        ({**GOOD, "micro_batch_tokens": {"tp4": 5}}, r"hotspa\.micro_batch_tokens: strategy tp4 is not in the pool"),
        ({**GOOD, "micro_batch_tokens": {"tp1": 0}}, r"hotspa\.micro_batch_tokens\.tp1 is 0"),
        ({"pool": "auto"}, r"hotspa\.profile is missing"),
        ({**GOOD, "assignment": "batch"}, r"hotspa\.profile is missing"),
        ({"pool": "auto", "profile": "p.json", "home": "tp1"}, r"hotspa\.home is given, but pool auto chooses it"),
        ({**GOOD, "profile": "p.json"}, r"hotspa\.profile is for pool auto"),
        ({**GOOD, "lengths": "wikipedia"}, r"hotspa\.lengths is for pool auto"),
    ],
)
def test_mistakes_name_their_key(block, message):
    with pytest.raises(ValueError, match=message):
        read_block({"hotspa": block})


@pytest.mark.parametrize("key", ["hotpsa", "HotSPa", "hot_spa", "hotspa_plugin", "hospa"])
def test_misspelt_name_of_the_block(key):
    with pytest.raises(ValueError, match=f"{key} is not a known key; did you mean 'hotspa'"):
        read_block({key: GOOD})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "holds no JSON object"),
        ('{"a": 1,}', "line 1, column"),
        ('{"hotspa": {"pool": "tp1:4", "pool": "tp1:5"}}', "key 'pool' stands twice"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_config(str(path))
    with pytest.raises(ValueError, match="No such file"):
        load_config(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"fp16": {"enabled": True}}, "fp16: loss scaling"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size: AutoTP"),
        ({"pipeline": {"stages": 2}}, "pipeline: PipelineEngine"),
        ({"autotuning": {"enabled": True}}, "autotuning"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: OneBitAdam compresses gradients"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type: Lamb is not known to update elementwise"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "zero_optimization.offload_optimizer"),
        ({"communication_data_type": "fp16"}, "communication_data_type"),
        ({"optimizer": {}}, "optimizer.type: none given"),
        ({"optimizer": "AdamW"}, 'optimizer: is "AdamW", but must be a block'),
        ({"train_batch_size": "auto"}, "train_batch_size: 'auto'"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr: 'auto'"),
        ({"bf16": {"enabled": "auto"}}, "bf16.enabled: 'auto'"),
        ({"bf16": True}, "bf16: is true, but must be a block"),
        ({"zero_optimization": 2}, "zero_optimization: is 2, but must be a block"),
        ({"zero_optimization": {"stage": "two"}}, 'zero_optimization.stage: is "two", but must be 0, 1, 2 or 3'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: is 4"),
        ({"gradient_clipping": "1.0"}, 'gradient_clipping: is "1.0", but must be a number'),
        ({"gradient_clipping": -1}, "gradient_clipping: is -1"),
        ({"steps_per_print": "x"}, 'steps_per_print: is "x"'),
        ({"optimizer": {"type": "Adam", "params": {"lr": "1e-3"}}}, 'optimizer.params.lr: is "1e-3"'),
        ({"bf16": {"enabld": True}}, "bf16.enabld: is not a known key; known are enabled"),
        ({"bf16": {"enabled": "true"}}, 'bf16.enabled: is "true", but must be true or false'),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype: is "bf16"'),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, "zero_optimization.cpu_offload"),
    ],
)
def test_settings_that_cannot_be_exact_are_named(config, named):
    (problem,) = refusals.find_problems(config)
    assert named in problem


def test_settings_that_are_fine():
    config = {
        "train_batch_size": 8, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "overlap_comm": True},
        "autotuning": {"enabled": False}, "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False},
        "hotspa": {"pool": "auto"}, "flops_profiler": {"enabled": False},
        "gradient_clipping": 1.0, "communication_data_type": "fp32",
    }  # fmt: skip
    assert refusals.find_problems(config) == []


def test_optimizers_of_the_users_own():
    class Lamb(torch.optim.SGD):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    refusals.check_optimizer(torch.optim.AdamW(parameters))
    with pytest.raises(ValueError, match="optimizer: Lamb does not update elementwise"):
        refusals.check_optimizer(Lamb(parameters))


def test_documented_families_are_those_that_are_taken():
    from hotspa_plugin.integrations.deepspeed.model_checks import EXACT_FAMILIES

    text = Path(hotspa_plugin.__file__).parents[1].joinpath("docs/deepspeed.md").read_text(encoding="utf-8")
    listed = text.split("others are refused:")[1].split("Also refused")[0]
    assert re.findall(r"`(\w+)`", listed) == list(EXACT_FAMILIES)


def test_engine_is_given_fp32_and_one_backward_pass():
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"}, "hotspa": GOOD, "zero_optimization": {"stage": 1},
    }  # fmt: skip
    assert engine_config.compute_dtype(config) is torch.bfloat16
    assert engine_config.engine_config(config, home_dp=2, world_size=4) == {
        "train_batch_size": 24, "train_micro_batch_size_per_gpu": 12, "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 1},
    }  # fmt: skip
    assert config["bf16"] == {"enabled": True}  # the user's own is left alone


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "train_batch_size is missing"),
        ({"train_batch_size": 0}, "train_batch_size is 0"),
        ({"train_batch_size": True}, "train_batch_size is True"),
        ({"train_batch_size": 8.0}, "train_batch_size is 8.0"),
        ({"train_batch_size": 7}, "not a multiple of home's 2"),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
            "correct or leave",
        ),
    ],
)
def test_batch_sizes_that_do_not_add_up(config, message):
    with pytest.raises(ValueError, match=message):
        engine_config.engine_config(config, home_dp=2, world_size=4)


def test_doctor_says_what_would_happen(tmp_path):
    path = tmp_path / "ds_config.json"

    def examine(config: dict, **options) -> list[tuple[str, str]]:
        path.write_text(json.dumps(config))
        return [
            (f.subject, f.status)
            for f in examine_config(path, **options)
            if f.subject not in ("deepspeed", "transformers")
        ]

    assert examine({}) == [("hotspa", "note")]
    assert examine({"hotspa": {"pol": "tp1:4"}}) == [(str(path), "problem")]
    assert examine({"hotspa": GOOD}, num_ranks=4) == [("hotspa", "ok"), ("hotspa.pool", "ok")]
    assert examine({"hotspa": GOOD}, num_ranks=3) == [("hotspa", "ok"), ("hotspa.pool", "problem")]
    assert examine({"hotspa": GOOD, "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}) == [
        ("hotspa", "ok"), ("fp16", "problem"), ("zero_optimization.stage", "note"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (json.dumps({"train_batch_size": 8, "hotspa": GOOD}), 0, ["active where", "pool tp1:64 tp2:128, home tp2"]),
        (json.dumps({"hotspa": {**GOOD, "enabled": False}}), 0, ["switched off"]),
        (json.dumps({"hotspa": {**GOOD, "pakcing": "packed"}}), 1, ["hotspa.pakcing", "did you mean 'packing'"]),
        (json.dumps({"hotpsa": GOOD}), 1, ["hotpsa is not a known key"]),
        (json.dumps({"hotspa": GOOD, "fp16": {"enabled": True}}), 1, ["fp16", "use bf16 or fp32"]),
        (json.dumps({"hotspa": GOOD, "zero_optimization": 1}), 1, ["must be a block"]),
        ('{"hotspa": ', 1, ["line 1"]),
    ],
)
def test_doctor_command(tmp_path, capsys, text, code, said):
    from hotspa_plugin.cli.main import run

    path = tmp_path / "ds.json"
    path.write_text(text)
    assert run(["doctor", str(path)]) == code
    shown = " ".join("".join(capsys.readouterr()).split())
    for part in said:
        assert part in shown


def test_doctor_needs_neither_torch_nor_deepspeed():
    code = (
        "import sys, hotspa_plugin.integrations.deepspeed.doctor; "
        "sys.exit(', '.join(m for m in ('torch', 'deepspeed', 'transformers') if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
