"""``hotspa train`` on 4 ranks of which one is killed, stopped or slow: how it ends, and what a resumed run repeats.

All faults in all phases: ``python -m tests.integrations.megatron.fault_table``, whose checks these tests share.
"""

import pytest

from .fault_run import PHASES
from .fault_table import NUM_STEPS, check, losses, prepare, train, train_with_fault

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def unbroken(folder):
    return train(folder, "unbroken")


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("kill", "parameter switch"), ("kill", "checkpoint write"), ("stop", "flush"), ("stop", "checkpoint write")],
)
def test_a_broken_run_ends_in_time_and_its_resumed_run_repeats_the_losses(folder, unbroken, kind, phase):
    """A switch under way (kill), and a checkpoint of which one rank has written half."""
    out = f"{kind}-{phase.replace(' ', '-')}"
    check(train_with_fault(folder, out, kind, phase), kind, phase)
    assert train(folder, out, "--resume") == unbroken
    assert len(unbroken) == NUM_STEPS


def test_a_rank_that_is_merely_slow_changes_nothing(folder, unbroken):
    ending = train_with_fault(folder, "slow", "slow", "every", slow_s=2.0)
    assert ending.exit_code == 0 and ending.processes_left == 0, ending
    assert losses(folder / "slow") == unbroken


@pytest.mark.parametrize("pool", ["tp1:48 tp2pp2:256", "tp2:40 pp2:100 tp2pp2:256"])
def test_resumed_with_another_pool_and_the_same_home(folder, unbroken, pool):
    """The same losses up to rounding: other strategies add up in another order."""
    out = "other-" + pool.replace(" ", "_").replace(":", "-")
    first = train(folder, out, "--steps", "4")
    config = folder / f"{out}.yaml"
    resumed = train(folder, out, "--resume", pool=pool)
    assert config.read_text().count(pool) == 1
    assert resumed[:4] == first and resumed == pytest.approx(unbroken, rel=1e-5)


def test_resumed_with_another_home_is_refused(folder):
    train(folder, "home", "--steps", "2")
    with pytest.raises(AssertionError, match="written by another home strategy .*resume with the one it"):
        train(folder, "home", "--resume", pool="tp1:32 tp2:256")


def test_every_phase_has_a_row():
    page = open("docs/benchmarks/faults.md", encoding="utf-8").read()
    assert all(f"| {phase} |" in page for phase in PHASES)
