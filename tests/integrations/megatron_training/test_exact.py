"""Hot switching in the real training loop against stock Megatron on the same documents, number by number."""

import pytest

from tests.integrations.megatron_training.comparing import assert_same_training, relative, worst_tensor
from tests.integrations.megatron_training.conftest import BASE

pytestmark = pytest.mark.gloo
slow = pytest.mark.slow

SAMPLE = "--hotspa-sample-unit sample"
POOL = "--hotspa-pool 'tp1:16 tp2:48 tp4:128'"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.fixture(scope="module")
def static_tp4(pretrain_once):
    return pretrain_once("--tensor-model-parallel-size 4", iterations=20)


@pytest.fixture(scope="module")
def static_dp4(pretrain_once, static_tp4):
    return pretrain_once("", iterations=20)


def test_three_strategies_train_like_each_static_one(pretrain, static_tp4, static_dp4):
    hot = pretrain(f"--tensor-model-parallel-size 4 {SAMPLE} {POOL} --hotspa-check-every 5", iterations=20)
    assert_same_training(hot, static_tp4)
    assert_same_training(hot, static_dp4)


@slow
@pytest.mark.parametrize(
    "flags",
    [
        f"--tensor-model-parallel-size 2 {OVERLAP} {SAMPLE} --hotspa-pool 'tp1:16 tp4:48 tp2:128'",
        f"--use-distributed-optimizer --tensor-model-parallel-size 2 {SAMPLE} --hotspa-pool 'tp1:16 tp4:48 tp2:128'",
    ],
)
def test_the_distributed_optimizer_trains_the_same_for_twenty_iterations(pretrain, static_dp4, flags):
    assert_same_training(pretrain(flags, iterations=20), static_dp4)


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
        "--tensor-model-parallel-size 4 --sequence-parallel --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128'",
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
def test_a_few_steps_are_exact(pretrain, static_tp4, flags):
    hot = pretrain(f"{SAMPLE} {flags}", iterations=3)
    assert hot.code == 0, hot.errors
    assert max(relative(hot.losses, static_tp4.losses[:3])) < 1e-6
    assert max(relative(hot.grad_norms, static_tp4.grad_norms[:3])) < 1e-6
    assert worst_tensor(hot.gradients(), static_tp4.gradients())[0] < 1e-5
    assert not hot.copies


def test_documents_read_by_the_plugin_are_the_same_samples(pretrain, static_tp4):
    hot = pretrain(f"--tensor-model-parallel-size 4 {POOL}", iterations=3)
    assert max(relative(hot.losses, static_tp4.losses[:3])) < 1e-6


@slow
@pytest.mark.parametrize(
    ("model", "changes", "flags"),
    [
        ("tied", ("--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear",
                  "--position-embedding-type learned_absolute"), ""),
        ("q/k norms", ("", ""), "--qk-layernorm"),
        ("q/k norms, sequence parallel", ("", ""), "--qk-layernorm --sequence-parallel"),
    ],
)  # fmt: skip
def test_other_models_are_exact(pretrain, model, changes, flags):
    base = BASE.replace("\n    ", " ").replace(*changes) if changes[0] else BASE
    base = base.replace("--untie-embeddings-and-output-weights", "") if model == "tied" else base
    options = {"model": model.replace("/", ""), "base": base}
    static = pretrain(f"--tensor-model-parallel-size 4 {flags}", **options)
    hot = pretrain(
        f"--tensor-model-parallel-size 4 {flags} {SAMPLE} --hotspa-pool 'tp1:16 tp2pp2:48 tp4:128'", **options
    )
    assert_same_training(hot, static)


@pytest.mark.parametrize(
    ("fault", "flags"),
    [
        ("all partial", "--tensor-model-parallel-size 4"),
        pytest.param("all identical", "--tensor-model-parallel-size 4 --sequence-parallel", marks=slow),
        pytest.param("count everywhere", "--tensor-model-parallel-size 2", marks=slow),
        ("stale parameters", f"--tensor-model-parallel-size 2 {OVERLAP}"),
    ],
)
def test_what_is_wrong_on_purpose_shows(pretrain, static_tp4, fault, flags):
    hot = pretrain(f"{flags} {SAMPLE} {POOL}", iterations=3, fault=fault)
    wrong = worst_tensor(hot.gradients(), static_tp4.gradients())[0] > 1e-3
    drifted = max(relative(hot.grad_norms, static_tp4.grad_norms[:3])) > 1e-5
    assert wrong or drifted


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
