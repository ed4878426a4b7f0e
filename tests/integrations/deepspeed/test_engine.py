"""The engine that users hold: unchanged without a block, bf16, checkpoints, refusals, its methods."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.integrations.deepspeed import work

pytestmark = pytest.mark.gloo

WORK = "tests.integrations.deepspeed.work"
POOL = "tp1:64 tp2:128 tp4:256"
EVEN = [[7, 65, 40, 64, 200, 150, 20, 33], [5, 9, 130, 40, 128, 60, 11, 90]]  # DeepSpeed's own runs share 8 among 4
BATCHES = [*EVEN, [12, 13, 14], [250, 3]]


def test_without_a_block_deepspeed_is_untouched(workers):
    runs = []
    for import_plugin, block in [(False, None), (True, None), (True, {"pool": POOL, "enabled": False})]:
        config = work.ds_config(pool=None, stage=1)
        if block is not None:
            config["hotspa"] = block
        runs.append(
            workers.run(
                f"{WORK}:train_deepspeed", family="llama", config=config, batches=EVEN, import_plugin=import_plugin
            )
        )
    for other in runs[1:]:
        assert [rank["losses"] for rank in other] == [rank["losses"] for rank in runs[0]]
        for name, weight in runs[0][0]["weights"].items():
            assert torch.equal(other[0]["weights"][name], weight)


def test_bf16_differs_from_fp32_no_more_than_static_deepspeed(workers):
    batches = EVEN * 3
    exact = workers.run_reference(f"{WORK}:train_reference", family="llama", batches=batches)
    bf16 = {"bf16": {"enabled": True}}
    static = workers.run(
        f"{WORK}:train_deepspeed", family="llama", config=work.ds_config(pool=None, stage=1, **bf16),
        batches=batches, import_plugin=True,
    )  # fmt: skip
    hot = workers.run(
        f"{WORK}:train", family="llama", config=work.ds_config(pool=POOL, stage=1, **bf16), batches=batches
    )[0]
    assert hot["differing"] == []
    static_losses = [sum(losses) / 4 for losses in zip(*(rank["losses"] for rank in static))]

    def weight_error(weights: dict) -> float:
        square = sum(
            (weights[name].float() - weight).double().square().sum() for name, weight in exact["weights"].items()
        )
        return float(square**0.5)

    def loss_error(losses: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(losses, exact["losses"], strict=True))

    assert 0 < weight_error(hot["weights"]) <= 1.2 * weight_error(static[0]["weights"])
    assert loss_error(hot["losses"]) <= 2 * loss_error(static_losses)


@pytest.mark.parametrize(("stage", "changed"), [(1, {}), (2, {"pool": "tp1:100 tp2:256"}), (1, {"bf16": True})])
def test_resumed_run_equals_the_unbroken_one(workers, tmp_path, stage, changed):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 3, "warmup_type": "linear"}}
    config = work.ds_config(pool=POOL, stage=stage, block={"home": "tp2"}, scheduler=scheduler)
    if changed.get("bf16"):
        config["bf16"] = {"enabled": True}
    other = copy.deepcopy(config)
    if "pool" in changed:
        other["hotspa"]["pool"] = changed["pool"]
    result = workers.run(
        f"{WORK}:resume", family="llama", config=config, other=other, batches=BATCHES, folder=str(tmp_path)
    )[0]
    assert result["lr"] == [1e-3]
    if "pool" in changed:
        assert result["resumed"] == pytest.approx(result["unbroken"], abs=1e-5)
        for name, weight in result["expected"].items():
            assert (result["actual"][name] - weight).abs().max() < 1e-5, name
    else:
        assert result["resumed"] == result["unbroken"]
        for name, weight in result["expected"].items():
            assert torch.equal(result["actual"][name], weight), name


def test_another_home_is_refused_by_name(workers, tmp_path):
    config = work.ds_config(pool=POOL, stage=1, block={"home": "tp2"})
    workers.run(f"{WORK}:save", family="llama", config=config, folder=str(tmp_path))
    config["hotspa"]["home"] = "tp4"
    with pytest.raises(ValueError, match=r"saved with home tp2, this run has home tp4: set hotspa.home to tp2"):
        workers.run(f"{WORK}:load", family="llama", config=config, folder=str(tmp_path))


def test_methods_of_the_engine(workers, tmp_path):
    """Many small questions in one launch: see ``work.exercise``."""
    for problems in workers.run(f"{WORK}:exercise", folder=str(tmp_path)):
        assert problems == []


@pytest.mark.parametrize(
    ("changes", "model", "message"),
    [
        ({"pool": "tp1:64 tp3:128"}, "llama", r"strategy tp3: tp\*pp\*cp = 3 does not divide the world size 4"),
        ({"pool": "tp1:64 tp2pp2:128"}, "llama", r"tp2pp2: Hugging Face models have no pipeline"),
        ({"pool": "tp1:64 tp2:128"}, "gpt2", r"model GPT2LMHeadModel has no tensor-parallel plan"),
        ({"pool": "tp1:64 tp4:128"}, "llama-2kv", r"tp 4 does not divide num_key_value_heads 2 .*fit: 1, 2"),
        ({"pool": "tp1:64"}, "linear", r"model: Linear can be trained by DeepSpeed, but not switched"),
        ({"pool": "tp1:64"}, "frozen", r"no parameter is trained"),
        ({"pool": "tp1:64"}, "half", r"is torch.bfloat16, the configuration asks for torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(workers, changes, model, message):
    with pytest.raises(ValueError, match=message):
        workers.run(f"{WORK}:start", model=model, config=work.ds_config(pool=None, hotspa=changes))
