"""What surrounds training in a real run: checkpoints, evaluation, logs, refusals."""

import json

import pytest

from tests.integrations.megatron_training.comparing import relative

pytestmark = pytest.mark.gloo

POOL = "--tensor-model-parallel-size 2 --hotspa-sample-unit sample --hotspa-pool 'tp1:16 tp4:48 tp2:128'"
slow = pytest.mark.slow
OPTIMIZERS = [
    pytest.param("", id="plain"),
    pytest.param("--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable", id="distributed"),
]


@slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("iterations", [4, 20])
def test_a_resumed_run_repeats_one_without_a_stop(pretrain, tmp_path, optimizer, iterations):
    import torch

    half = iterations // 2
    whole = pretrain(f"{POOL} {optimizer}", iterations=iterations)
    stopped = pretrain(
        f"{POOL} {optimizer} --save {tmp_path} --save-interval {half} --exit-interval {half}", iterations=iterations
    )
    assert stopped.losses == whole.losses[:half]
    resumed = pretrain(f"{POOL} {optimizer} --load {tmp_path}", iterations=iterations, model=None)
    assert resumed.losses == whole.losses[half:]
    assert resumed.grad_norms == whole.grad_norms[half:]
    expected = whole.parameters()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.parameters().items())


@slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_with_another_pool_static_and_with_another_home(pretrain, tmp_path, optimizer):
    whole = pretrain(f"{POOL} {optimizer}", iterations=20)
    pretrain(f"{POOL} {optimizer} --save {tmp_path} --save-interval 10 --exit-interval 10", iterations=20)
    for flags in (
        "--tensor-model-parallel-size 2 --hotspa-pool 'tp1:32 tp2:128'",
        "--tensor-model-parallel-size 2",
        "--tensor-model-parallel-size 4 --hotspa-pool 'tp1:32 tp4:128'",
    ):
        joined = pretrain(f"{flags} {optimizer} --load {tmp_path}", iterations=20, model=None)
        assert joined.code == 0, joined.errors
        assert max(relative(joined.losses, whole.losses[10:])) < 1e-5, flags
        assert max(relative(joined.grad_norms, whole.grad_norms[10:])) < 1e-5, flags


@slow
def test_hot_switching_joins_a_static_run(pretrain, tmp_path):
    static = "--tensor-model-parallel-size 2 --use-distributed-optimizer"
    whole = pretrain(static, iterations=20)
    pretrain(f"{static} --save {tmp_path} --save-interval 10 --exit-interval 10", iterations=20)
    overlap = "--overlap-grad-reduce --overlap-param-gather"
    for flags in ("", overlap):
        joined = pretrain(f"{POOL} --use-distributed-optimizer {flags} --load {tmp_path}", iterations=20, model=None)
        assert joined.code == 0, joined.errors
        assert max(relative(joined.losses, whole.losses[10:])) < 1e-5
        assert max(relative(joined.grad_norms, whole.grad_norms[10:])) < 1e-5


@slow
def test_another_home_is_refused_where_its_checkpoint_cannot_be_resharded(pretrain, tmp_path):
    saved = pretrain(
        f"{POOL} --use-distributed-optimizer --save {tmp_path} --save-interval 1 --exit-interval 1", iterations=2
    )
    assert saved.code == 0, saved.errors
    refused = pretrain(
        "--tensor-model-parallel-size 4 --hotspa-pool 'tp1:32 tp4:128' --use-distributed-optimizer "
        f"--load {tmp_path}", iterations=2, model=None,
    )  # fmt: skip
    assert refused.code == 2
    assert "another home" in refused.errors
    assert "--hotspa-home" in refused.errors
    assert "--dist-ckpt-optim-fully-reshardable" in refused.errors


EVALUATION = "--split 80,20,0 --eval-iters 2 --eval-interval 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@pytest.fixture(scope="module")
def watched(pretrain_once, tmp_path_factory):
    """A run with evaluation, records and TensorBoard, and the folder of the latter two."""
    folder = tmp_path_factory.mktemp("watched")
    run = pretrain_once(
        f"{POOL} {EVALUATION} {OVERLAP} --hotspa-report-dir {folder / 'records'} --tensorboard-dir {folder / 'board'}"
    )
    return run, folder


def test_evaluation_gives_the_static_loss(pretrain, watched):
    hot, _ = watched
    static = pretrain(f"--tensor-model-parallel-size 4 {EVALUATION}")
    assert len(hot.validation) == len(static.validation) > 0
    assert max(relative(hot.validation, static.validation)) < 1e-6
    assert max(relative(hot.losses, static.losses)) < 1e-6


def test_log_line_and_records_tell_every_bucket(watched):
    run, folder = watched
    lines = [line for line in run.output.splitlines() if line.startswith(" hotspa | ")]
    assert len(lines) == 3
    assert all("tp1:16: " in line and "tp2nosp:128: " in line and "switches: " in line for line in lines)
    steps = [json.loads(line) for line in (folder / "records" / "steps.jsonl").read_text().splitlines()]
    assert [step["sequences"] for step in steps] == [16, 16, 16]
    assert [step["loss"] for step in steps] == pytest.approx(run.losses, rel=1e-6)
    assert (folder / "records" / "trace.json").exists()


@slow
def test_random_sequences_of_a_length_distribution(pretrain):
    pool = "--tensor-model-parallel-size 4 --hotspa-pool 'tp1:16 tp4:128'"
    run = pretrain(f"{pool} --mock-data --hotspa-mock-lengths uniform:1-128", model=None)
    assert run.code == 0, run.errors
    assert len(run.losses) == 3


def test_help_shows_the_flags(pretrain):
    shown = pretrain("--help")
    assert shown.code == 0
    assert "hotspa:" in shown.output
    assert "--hotspa-pool SPEC" in shown.output


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--hotspa-pool 'tp2:16 tp4:128'", "tp1 (--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1)"),
        ("--hotspa-pool 'tp1:16 tp4:128' --hotspa-home tp2", "--hotspa-home tp2 is not in --hotspa-pool"),
        ("--hotspa-pool 'tp1:16 tp3:128'", "tp*pp*cp = 3 does not divide the world size 4"),
        ("--hotspa-pool 'tp1:16 tp4'", "--hotspa-pool: pool: entry at character 8: 'tp4' lacks a length bound"),
        ("--hotspa-pool 'tp1:16 pp4:128' --num-layers 6", "do not split the 6 layers"),
        ("--hotspa-pool 'tp1:16 tp4:128' --make-vocab-size-divisible-by 1 --vocab-size 253",
         "set --make-vocab-size-divisible-by 4"),
        ("--hotspa-pool 'tp1:16 tp4:100'", "has 128 tokens, over the last bound of 100"),
        ("--hotspa-pool 'tp1:16 tp2:128' --context-parallel-size 2", "--context-parallel-size 2 does not go together"),
    ],
)  # fmt: skip
def test_a_wrong_start_is_refused_in_one_line(pretrain, flags, said):
    run = pretrain(flags, model=None)
    assert run.code == 2
    assert not run.losses
    lines = [line for line in run.errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert said in lines[0]
    assert "--" in lines[0]


@slow
def test_overlong_documents_are_cut_on_request(pretrain):
    run = pretrain("--hotspa-pool 'tp4:16 tp1:100' --hotspa-overlong truncate", model=None)
    assert run.code == 0, run.errors
    assert "sequences over 100 tokens: cut to it" in run.output


def test_every_hook_is_in_place_and_can_be_taken_out(ranks):
    states = ranks.run("tests.integrations.megatron_training.rank:inventory_symbols")[0]
    half = len(states) // 2
    assert all(hooked for _, hooked in states[:half])
    assert not any(hooked for _, hooked in states[half:])
