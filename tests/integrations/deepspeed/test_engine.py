"""The engine that users hold: unchanged without a block, bf16, checkpoints, refusals, its methods."""

from __future__ import annotations

import copy
import functools
import importlib.util

import pytest
import torch

from tests.integrations.deepspeed import work

pytestmark = pytest.mark.gloo

WORK = "tests.integrations.deepspeed.work"
START = "tests.integrations.deepspeed.start_work:start"
ENGINE_WORK = "tests.integrations.deepspeed.engine_work"
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


def check_bf16(hot: dict, static: list[dict], exact: dict) -> None:
    """In bf16 weights and losses differ from fp32's no more than static DeepSpeed's do."""
    assert hot["differing"] == []
    static_losses = [sum(losses) / 4 for losses in zip(*(rank["losses"] for rank in static))]

    def weight_error(weights: dict) -> float:
        assert weights.keys() == exact["weights"].keys()
        square = sum((weights[name].float() - w).double().square().sum() for name, w in exact["weights"].items())
        return float(square**0.5)

    def loss_error(losses: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(losses, exact["losses"], strict=True))

    hot_error, static_error = weight_error(hot["weights"]), weight_error(static[0]["weights"])
    print(f"weights: hot {hot_error:.3g}, static {static_error:.3g}; "
          f"losses: hot {loss_error(hot['losses']):.3g}, static {loss_error(static_losses):.3g}")  # fmt: skip
    assert 0 < hot_error <= 1.2 * static_error
    assert loss_error(hot["losses"]) <= 2 * loss_error(static_losses)


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.slow
def test_bf16_differs_from_fp32_no_more_than_static_deepspeed(workers):
    batches = EVEN * 3
    exact = workers.run_reference(f"{WORK}:train_reference", family="llama", batches=batches)
    static = workers.run(
        f"{WORK}:train_deepspeed", family="llama", config=work.ds_config(pool=None, stage=1, **BF16),
        batches=batches, import_plugin=True,
    )  # fmt: skip
    hot = workers.run(
        f"{WORK}:train", family="llama", config=work.ds_config(pool=POOL, stage=1, **BF16), batches=batches
    )[0]
    check_bf16(hot, static, exact)


@pytest.mark.slow
def test_bf16_megatron_model_differs_no_more_than_static_deepspeed(workers):
    pytest.importorskip("megatron.core")
    batches, preset = EVEN * 3, "tiny-llama"
    hot = workers.run(
        f"{WORK}:train_megatron", config=work.ds_config(pool=POOL, stage=1, **BF16), batches=batches, preset=preset,
        dtype=torch.bfloat16,
    )[0]  # fmt: skip
    static = workers.run(
        f"{WORK}:train_deepspeed_megatron", preset=preset, config=work.ds_config(pool=None, stage=1, **BF16),
        pool=POOL, batches=batches, initial=hot["initial"],
    )  # fmt: skip
    initial = {name: value.float() for name, value in hot["initial"].items()}
    exact = workers.run_reference(
        f"{WORK}:train_megatron_reference", preset=preset, pool=POOL, batches=batches, initial=initial
    )
    check_bf16(hot, static, exact)


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (1, {}),
        (2, {}),
        pytest.param(2, {"hotspa": {"pool": "tp1:100 tp2:256", "home": "tp2"}}, id="2-pool"),
        pytest.param(1, {"hotspa": {"pool": "tp1:100 tp2:256", "home": "tp2"}}, id="1-pool", marks=pytest.mark.slow),
        pytest.param(1, BF16, id="1-bf16", marks=pytest.mark.slow),
        pytest.param(2, BF16, id="2-bf16", marks=pytest.mark.slow),
        pytest.param(0, {}, id="0", marks=pytest.mark.slow),
        pytest.param(3, {}, id="3", marks=pytest.mark.slow),
    ],
)
def test_resumed_run_equals_the_unbroken_one(workers, tmp_path, stage, changes):
    """Bit for bit; where the pool changes while home stays, as near as two pools are to each other."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 3, "warmup_type": "linear"}}
    config = work.ds_config(pool=POOL, stage=stage, block={"home": "tp2"}, scheduler=scheduler)
    config.update({key: value for key, value in changes.items() if key != "hotspa"})
    other = copy.deepcopy(config) | changes
    result = workers.run(
        f"{ENGINE_WORK}:resume", family="llama", config=config, other=other, batches=BATCHES, folder=str(tmp_path)
    )[0]
    assert result["lr"] == [1e-3]
    if "hotspa" in changes:
        assert result["resumed"] == pytest.approx(result["unbroken"], abs=1e-5)
        for name, weight in result["expected"].items():
            assert (result["actual"][name] - weight).abs().max() < 1e-5, name
    else:
        assert result["resumed"] == result["unbroken"]
        for name, weight in result["expected"].items():
            assert torch.equal(result["actual"][name], weight), name


def test_another_home_is_refused_by_name(workers, tmp_path):
    config = work.ds_config(pool=POOL, stage=1, block={"home": "tp2"})
    workers.run(f"{ENGINE_WORK}:save", family="llama", config=config, folder=str(tmp_path))
    config["hotspa"]["home"] = "tp4"
    with pytest.raises(ValueError, match=r"saved with home tp2, this run has home tp4: set hotspa.home to tp2"):
        workers.run(f"{ENGINE_WORK}:load", family="llama", config=config, folder=str(tmp_path))


def test_another_model_or_stage_is_refused_before_anything_changes(workers, tmp_path):
    folder = str(tmp_path)
    configs = {stage: work.ds_config(pool=POOL, stage=stage) for stage in (0, 1, 2, 3)}
    workers.run(f"{ENGINE_WORK}:save", family="llama", config=configs[1], folder=folder)
    load = functools.partial(workers.run, f"{ENGINE_WORK}:load", folder=folder)
    with pytest.raises(ValueError, match=r"another model: it has model.* of shape \(.*\), this run has .* of shape"):
        load(family="llama", config=configs[1], sizes={"intermediate_size": 128})
    with pytest.raises(ValueError, match=r"another model: it has no .*bias, this run has .*bias of shape \(16,\)"):
        load(family="qwen2", config=configs[1])
    for stage in (0, 3):
        with pytest.raises(ValueError, match=rf"saved at ZeRO stage 1, this run is at {stage}: set zero_optimization"):
            load(family="llama", config=configs[stage])
    load(family="llama", config=configs[2])  # the same state in the same files
    load(family="llama", config=configs[0], load_module_only=True)


@pytest.mark.parametrize("what", ["refuse_batches", "exercise", "feed"])
def test_methods_of_the_engine(workers, tmp_path, what):
    """Many small questions in one launch: see ``engine_work``."""
    options = {} if what == "refuse_batches" else {"folder": str(tmp_path)}
    for problems in workers.run(f"{ENGINE_WORK}:{what}", **options):
        assert problems == []


def test_monitors_have_loss_norm_rate_and_strategies(workers, tmp_path):
    kinds = ["csv_monitor"]
    kinds += [kind for kind in ("tensorboard", "wandb") if importlib.util.find_spec(kind) is not None]
    for problems in workers.run(f"{ENGINE_WORK}:monitors", folder=str(tmp_path), kinds=kinds):
        assert problems == []


TWO = "tp1:64 tp2:128"


@pytest.mark.parametrize(
    ("pool", "model", "message"),
    [
        ("tp1:64 tp3:128", "llama", r"hotspa.pool: strategy tp3"),
        ("tp1:64 tp2pp2:128", "llama", r"hotspa.pool: strategy tp2pp2: Hugging Face models have no pipeline"),
        (TWO, "gpt2", r"model GPT2LMHeadModel has no tensor-parallel plan"),
        ("tp1:64 tp4:128", "few-kv-heads", r"hotspa.pool: .*tp 4 does not divide num_key_value_heads 2 .*fit: 1, 2"),
        (TWO, "odd-heads", r"hotspa.pool: .*tp 2 does not divide num_key_value_heads 3 .*fit: 1"),
        (TWO, "linear", r"model: Linear can be trained by DeepSpeed, but not switched"),
        (TWO, "none", r"initialize: model is missing"),
        (TWO, "class", r"model: Linear can be trained by DeepSpeed, but not switched"),
        (TWO, "t5", r"model: T5Config describes no causal language model"),
        (TWO, "unknown-style", r"model LlamaForCausalLM: its tensor-parallel plan asks for 'packed_colwise' at "),
        # Releases of transformers differ in its plan: one before 5.25 asks for a style that is not known.
        (TWO, "mixtral", r"model:? .*MixtralForCausalLM"),
        ("tp1:64", "mixtral", r"model: nothing shows that MixtralForCausalLM \(mixtral\) trains exactly"),
        (TWO, "changed", r"LlamaForCausalLM built from its configuration has other parameters"),
        (TWO, "bert", r"model: BertForSequenceClassification is no causal language model"),
        (TWO, "mamba", r"model: MambaForCausalLM "),
        (TWO, "dynamic-rope", r"model: rope_type 'dynamic' depends on the longest sequence"),
        (TWO, "buffer", r"model: persistent buffer counts is no parameter"),
        (TWO, "frozen", r"no parameter is trained"),
        (TWO, "half", r"is torch.bfloat16, the configuration asks for torch.float32"),
        (
            "tp1:64 tp4:128",
            "huge",
            r"hotspa.pool: strategy tp1 needs [\d.]+ GiB a rank before .* \(home .*, slab .*\), but a rank has",
        ),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_what_does_not_fit_is_refused_before_training(workers, pool, model, message):
    with pytest.raises(ValueError, match=message):
        workers.run(START, model=model, config=work.ds_config(pool=pool))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "hotspa cannot run with optimizer.type: OneBitAdam"),
        ({"fp16": {"enabled": True}}, "hotspa cannot run with fp16: loss scaling"),
        ({"train_batch_size": 6, "hotspa": {"pool": "tp1:64"}}, "train_batch_size 6 is not a multiple of home's 4"),
        ({"hotspa": {"pool": "tp1:64", "hom": "tp1"}}, "hotspa.hom is not a known key; did you mean 'home'"),
    ],
)
def test_configurations_refused_at_start(workers, changes, message):
    with pytest.raises(ValueError, match=message):
        workers.run(START, model="llama", config=work.ds_config(pool=POOL) | changes)
