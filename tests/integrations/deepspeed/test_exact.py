"""Training under a pool against one process: losses, norms and weights after some steps, per tensor gradients."""

from __future__ import annotations

import pytest

from tests.integrations.deepspeed import work

pytestmark = pytest.mark.gloo

WORK = "tests.integrations.deepspeed.work"
POOL = "tp1:128 tp2:512 tp4:2048"
# Every bucket; one sequence without a target; a batch without a long one; fewer sequences than replicas.
BATCHES = [
    [7, 129, 1, 64, 300, 600, 20, 33],
    [5, 9, 130, 40, 128, 60, 11, 700],
    [12, 13, 14],
    [513, 512, 2],
    [33, 64, 7, 90],
    [600],
    [1, 2, 129],
    [128, 128, 128, 128, 128],
    [250, 260, 3, 4],
    [40, 530],
]


@pytest.fixture(scope="module")
def reference(_workers):
    done = {}

    def run(family: str, batches=BATCHES, **sizes) -> dict:
        key = (family, len(batches), *sizes.items())
        if key not in done:
            done[key] = _workers.run_reference(f"{WORK}:train_reference", family=family, batches=batches, sizes=sizes)
        return done[key]

    return run


def check_equal(actual: dict, expected: dict) -> None:
    assert actual["differing"] == []
    assert actual["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    for mine, theirs in zip(actual["norms"], expected["norms"], strict=True):
        assert mine != mine or mine == pytest.approx(theirs, rel=1e-5)  # NaN: DeepSpeed reports none at ZeRO 0
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert (actual["weights"][name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("stage", "home", "packing"), [(0, "tp4", "packed"), (1, "tp2", "padded"), (2, "tp1", "packed")]
)
def test_ten_steps_equal_one_process(workers, reference, stage, home, packing):
    config = work.ds_config(pool=POOL, stage=stage, block={"home": home, "packing": packing})
    actual = workers.run(f"{WORK}:train", family="llama", config=config, batches=BATCHES)[0]
    check_equal(actual, reference("llama"))


@pytest.mark.parametrize(
    ("family", "stage", "pool", "home", "sizes"),
    [
        ("qwen3", 3, POOL, "tp2", {}),
        ("qwen3", 0, POOL, "tp4", {}),  # q/k norms replicated at home, each copy holding a part
        ("qwen2", 1, POOL, "tp2", {"tie_word_embeddings": True}),
        ("llama", 1, POOL, "tp2", {"attention_bias": True, "mlp_bias": True, "vocab_size": 98}),
        ("mistral", 0, "tp1:128 tp2rc:512 tp4rc:2048", "tp2rc", {"sliding_window": 100}),
    ],
)
def test_model_families(workers, reference, family, stage, pool, home, sizes):
    block = {"home": home, "switch": {"memory_mb": 0.05}, "micro_batch_tokens": {"tp1": 200}}
    config = work.ds_config(pool=pool, stage=stage, block=block)
    batches = BATCHES[:3]
    actual = workers.run(f"{WORK}:train", family=family, config=config, batches=batches, sizes=sizes)[0]
    check_equal(actual, reference(family, batches, **sizes))


@pytest.mark.parametrize(
    ("preset", "stage", "pool", "home"),
    [
        pytest.param("tiny-llama", 0, POOL, "tp4", marks=pytest.mark.slow),
        pytest.param("tiny-llama", 1, POOL, "tp2", marks=pytest.mark.slow),
        ("tiny-gpt", 2, "tp1:128 tp2pp2:512 tp4:2048", "tp2pp2"),
    ],
)
def test_megatron_models_equal_one_process(workers, preset, stage, pool, home):
    pytest.importorskip("megatron.core")
    config = work.ds_config(pool=pool, stage=stage, block={"home": home})
    actual = workers.run(f"{WORK}:train_megatron", config=config, batches=BATCHES, preset=preset)[0]
    expected = workers.run_reference(
        f"{WORK}:train_megatron_reference", preset=preset, pool=pool, batches=BATCHES, initial=actual["initial"]
    )
    check_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.xfail(reason="lengths that vary through the stages of a plain builder's pipeline meet wrong shapes")
def test_builder_of_plain_megatron_core(workers):
    """A pool trains as its home alone does."""
    pytest.importorskip("megatron.core")
    batches = [[7, 129, 1, 64, 300], [5, 140, 40]]
    losses = [
        workers.run(
            f"{WORK}:train_own_builder",
            config=work.ds_config(pool=pool, stage=1, block={"home": "tp2pp2nosp", "packing": "padded"}),
            batches=batches,
        )[0]
        for pool in ("tp1:100 tp2pp2nosp:512", "tp2pp2nosp:512")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_dropout_repeats_and_keeps_copies_equal(workers):
    config = work.ds_config(pool=POOL, stage=1, block={"home": "tp2"})
    runs = [
        workers.run(
            f"{WORK}:train", family="llama", config=config, batches=BATCHES[:2], sizes={"attention_dropout": rate}
        )[0]
        for rate in (0.2, 0.2, 0.0)
    ]
    assert runs[0]["differing"] == []
    assert runs[0]["losses"] == runs[1]["losses"]
    assert abs(runs[0]["losses"][0] - runs[2]["losses"][0]) > 1e-4
