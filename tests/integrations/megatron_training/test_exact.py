"""Hot switching in the real training loop against stock Megatron on the same documents, number by number."""

import pytest

from tests.integrations.megatron_training.comparing import assert_same_training
from tests.integrations.megatron_training.conftest import BASE

pytestmark = pytest.mark.gloo
slow = pytest.mark.slow

SAMPLE = "--hotspa-sample-unit sample"
POOL = "--hotspa-pool 'tp1:16 tp2:48 tp4:128'"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


BASES = {
    "default": BASE,
    "q/k norms": BASE + " --qk-layernorm",
    "tied": " ".join(BASE.split())
    .replace("--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear", "")
    .replace("--untie-embeddings-and-output-weights", "--position-embedding-type learned_absolute"),
}


def of_model(model):
    return {"model": model.replace("/", ""), "base": BASES[model]}


@pytest.fixture(scope="module")
def static_tp4(pretrain_once):
    return pretrain_once("--tensor-model-parallel-size 4", iterations=20)


@pytest.fixture(scope="module")
def static_dp4(pretrain_once, static_tp4):
    return pretrain_once("", iterations=20)


@pytest.fixture(scope="module")
def static(pretrain_once, static_tp4):
    """The first three iterations of each model of ``BASES`` under static tp4."""
    runs = {"default": static_tp4.first(3)}

    def run(model):
        if model not in runs:
            runs[model] = pretrain_once("--tensor-model-parallel-size 4", **of_model(model))
        return runs[model]

    return run


@pytest.mark.parametrize(
    "flags",
    [
        f"--tensor-model-parallel-size 2 {OVERLAP} --hotspa-pool 'tp1:16 tp4:48 tp2:128' --hotspa-check-every 5",
        pytest.param(f"--tensor-model-parallel-size 4 {POOL} --hotspa-check-every 5", marks=slow),
        pytest.param(
            "--use-distributed-optimizer --tensor-model-parallel-size 2 --hotspa-pool 'tp1:16 tp4:48 tp2:128'",
            marks=slow,
        ),
        pytest.param(f"--tensor-model-parallel-size 4 --use-distributed-optimizer {POOL}", marks=slow),
        pytest.param("--tensor-model-parallel-size 2 --hotspa-pool 'tp1:16 tp4:48 tp2:128'", marks=slow),
    ],
)
def test_three_strategies_train_like_each_static_one(pretrain, static_tp4, static_dp4, flags):
    hot = pretrain(f"{flags} {SAMPLE}", iterations=20)
    assert_same_training(hot, static_tp4)
    assert_same_training(hot, static_dp4)


@pytest.mark.parametrize(
    "flags",
    [
        f"{OVERLAP} --hotspa-pool 'tp4:127 tp1:128'",  # home without work on most ranks
        pytest.param(f"--pipeline-model-parallel-size 2 {OVERLAP} --hotspa-pool 'tp1:16 tp4:127 pp2:128'", marks=slow),
        pytest.param(
            "--tensor-model-parallel-size 2 --overlap-grad-reduce --hotspa-pool 'tp1:16 tp4:48 tp2:128'", marks=slow
        ),
        pytest.param(
            "--tensor-model-parallel-size 4 --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128' --hotspa-bucket-order descending",
            marks=slow,
        ),
        pytest.param(
            "--tensor-model-parallel-size 4 --sequence-parallel --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128'", marks=slow
        ),
        pytest.param("--pipeline-model-parallel-size 4 --hotspa-pool 'tp1:16 tp2pp2:48 pp4:128'", marks=slow),
        pytest.param("--pipeline-model-parallel-size 2 --hotspa-pool 'tp1:16 tp2pp2vpp2:48 pp2:128'", marks=slow),
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        f"{OVERLAP} --hotspa-pool 'tp1:16 tp4:48 pp2vpp2:128' --hotspa-overlap-switch flush",
        pytest.param("--hotspa-home tp2 --hotspa-pool 'tp1rc:16 tp4:48 tp2:128'", marks=slow),
        pytest.param(
            "--tensor-model-parallel-size 4 --hotspa-packing packed --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128'",
            marks=slow,
        ),
        "--tensor-model-parallel-size 4 --sequence-parallel --hotspa-packing packed "
        "--hotspa-pool 'tp1:16 tp2:48 tp4:128' --hotspa-switch-memory-mb 1 --hotspa-overlap-switch both",
    ],
)
def test_a_few_steps_are_exact(pretrain, static, flags):
    assert_same_training(pretrain(f"{SAMPLE} {flags}"), static("default"))


def test_documents_read_by_the_plugin_are_the_same_samples(pretrain, static):
    assert_same_training(pretrain(f"--tensor-model-parallel-size 4 {POOL}"), static("default"))


@slow
@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("tied", "--tensor-model-parallel-size 4"),
        ("tied", "--hotspa-home tp2pp2"),
        ("q/k norms", "--tensor-model-parallel-size 4"),
        ("q/k norms", "--tensor-model-parallel-size 4 --sequence-parallel"),
    ],
)
def test_other_models_are_exact(pretrain, static, model, flags):
    hot = pretrain(f"{flags} {SAMPLE} --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128'", **of_model(model))
    assert_same_training(hot, static(model))


HOME_TP4 = f"--tensor-model-parallel-size 4 {POOL}"
HOME_TP2 = "--tensor-model-parallel-size 2 --hotspa-pool 'tp1:16 tp4:48 tp2:128'"


@pytest.mark.parametrize(
    ("fault", "model", "flags"),
    [
        ("identical_added_to_one_copy", "default", HOME_TP4),
        pytest.param("identical_read_from_every_copy", "default", HOME_TP4, marks=slow),
        pytest.param("partial_read_from_one_copy", "default", f"{HOME_TP4} --sequence-parallel", marks=slow),
        pytest.param("partial_added_to_every_copy", "q/k norms", HOME_TP4, marks=slow),
        pytest.param("partial_read_from_one_copy", "q/k norms", HOME_TP4, marks=slow),
        pytest.param("tied_added_to_both_holders", "tied", "--hotspa-home pp2 --hotspa-pool 'tp1:16 tp4:48 pp2:128'",
                     marks=slow),
        pytest.param("count_summed_over_replicas", "default", HOME_TP2, marks=slow),
        pytest.param("replica_left_out", "default", HOME_TP2, marks=slow),
        pytest.param("flush_skipped", "default", HOME_TP2, marks=slow),
        pytest.param("gradients_kept_between_buckets", "default", HOME_TP2, marks=slow),
        pytest.param("piece_left_out_of_flush", "default", HOME_TP2, marks=slow),
        pytest.param("piece_left_out_of_switch", "default", HOME_TP2, marks=slow),
        pytest.param("parameters_not_gathered", "default", f"{HOME_TP2} {OVERLAP}", marks=slow),
    ],
)  # fmt: skip
def test_what_is_wrong_on_purpose_shows(pretrain, static, fault, model, flags):
    expected = static(model)
    # What was never written is poisoned with NaN, at which Megatron would stop before anything can be compared.
    hot = pretrain(f"{flags} {SAMPLE} --no-check-for-nan-in-loss-and-grad", fault=fault, **of_model(model))
    assert (hot.code, len(hot.losses)) == (0, 3)
    with pytest.raises(AssertionError):
        assert_same_training(hot, expected)


def test_the_checks_find_the_first_flush_that_is_wrong(pretrain):
    said = r"step 0, after the flush from tp1: the gradient of \S*norm\S* did not come home"
    with pytest.raises(RuntimeError, match=said):
        pretrain(f"{HOME_TP4} {SAMPLE} --hotspa-check-every 1", fault="identical_added_to_one_copy")


@slow
def test_dropout_is_reproducible(pretrain):
    base = BASE.replace("--attention-dropout 0 --hidden-dropout 0", "--attention-dropout 0.1 --hidden-dropout 0.1")
    flags = f"--tensor-model-parallel-size 4 {SAMPLE} --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128'"
    first, second = pretrain(flags, base=base), pretrain(flags, base=base)
    assert first.losses == second.losses
    assert first.grad_norms == second.grad_norms


def test_without_a_pool_megatron_is_what_it_was(pretrain, tmp_path, static_tp4):
    # The example installs the hooks itself, so the stock run takes a copy without that line.
    from tests.integrations.megatron_training.rank import SCRIPT

    stock = tmp_path / "stock.py"
    line = "import hotspa_plugin.megatron_adaptor  # noqa: F401  isort: skip\n"
    assert line in SCRIPT.read_text()
    stock.write_text(SCRIPT.read_text().replace(line, ""))
    unhooked = pretrain("--tensor-model-parallel-size 4", script=str(stock), hooks=False)
    assert unhooked.losses == static_tp4.losses[:3]
    assert unhooked.grad_norms == static_tp4.grad_norms[:3]
