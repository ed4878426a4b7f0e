"""Launching ranks, and what happens when one of them ends badly. Rank functions are at the top."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from hotspa_plugin.runtime import worker_pool
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.launch import RankFailure, UserError, in_torchrun, launch
from hotspa_plugin.runtime.rank_failure import FailureKind, RankReport, explain, is_peer_loss, is_user_error
from hotspa_plugin.runtime.worker_pool import WorkerPool

pytestmark = pytest.mark.newest  # starts many processes, which takes time


def fail_on(failing_rank, how):
    """One rank fails in the named way, the others wait for it in a collective."""
    set_activity(f"step 3, switch tp1 to tp{dist.get_rank() + 1}")
    if dist.get_rank() == failing_rank:
        if how == "exit":
            os._exit(7)
        if how == "hang":
            sleep_for_a_while()
    dist.barrier()


def sleep_for_a_while():
    time.sleep(600)


def raise_everywhere(text):
    raise ValueError(text)


def world():
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def unpicklable_result():
    return lambda: None


def divide(by):
    return 1 / by


def raise_on_all_but_rank_0():
    if dist.get_rank() > 0:
        raise_everywhere("only here")


SCRIPT = """
import os, sys, time
import torch.distributed as dist
from hotspa_plugin.runtime import worker_pool
from hotspa_plugin.runtime.activity import set_activity
from hotspa_plugin.runtime.launch import UserError, clean_exit, launch

def work(rank, world_size, how):
    print(f"pid {os.getpid()}")
    dist.barrier()
    if how == "grandchild" and rank == 0:
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        print(f"pid {child.pid}")
    if how == "user error":
        raise UserError("the folder is empty: name another")
    if how == "die" and rank == 1:
        os.kill(os.getpid(), 9)
    if how == "return":
        return
    if rank == 0:
        print("ready")
    time.sleep(600)

if __name__ == "__main__":
    with clean_exit():
        launch(work, None if sys.argv[1] == "torchrun" else 2, (sys.argv[-1],))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def start_script(script):
    """Starts the script with the arguments given, and ends it after the test."""
    started = []

    def start(*args, launcher=()):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, *launcher, str(script), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_pids_until_ready(process):
    pids = []
    for line in process.stdout:
        if line.startswith("pid"):
            pids.append(int(line.split()[1]))
        if line.startswith("ready"):
            break
    return pids


def running(pids):
    """Those of ``pids`` that still run; zombies have ended."""
    alive = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] != "Z":
                    alive.append(pid)
        except FileNotFoundError:
            pass
    return alive


def wait_until_ended(pids, limit_s=20):
    deadline_s = time.monotonic() + limit_s
    while running(pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return running(pids)


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2, extra_reference=True, env={"SAID_BY_TEST": "yes"}) as pool:
        yield pool


def test_pool_keeps_its_processes_and_answers_in_rank_order(pool):
    first, second = pool.run(world), pool.run(world)
    assert first == second
    assert [(rank, size) for rank, size, _ in first] == [(0, 2), (1, 2)]
    rank, size, pid = pool.run_reference(world)
    assert (rank, size) == (0, 1)
    assert pid not in [entry[2] for entry in first]


def test_functions_by_name_with_the_environment_that_was_asked_for(pool):
    assert pool.run("os:getenv", key="SAID_BY_TEST") == ["yes", "yes"]
    assert "SAID_BY_TEST" not in os.environ
    assert None not in pool.run("os:getenv", key="OMP_NUM_THREADS")


@pytest.mark.parametrize("target", ["os", "os:", "os:no_such_function", "no_such_package:function"])
def test_unknown_function(pool, target):
    with pytest.raises((ValueError, AttributeError, ModuleNotFoundError)):
        pool.run(target)
    assert pool.usable


def test_an_error_on_every_rank_comes_back_as_itself_and_leaves_the_pool_usable(pool):
    with pytest.raises(ValueError, match="not so") as caught:
        pool.run(raise_everywhere, text="not so")
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "in raise_everywhere" in str(caught.value.__cause__)
    with pytest.raises(ZeroDivisionError):
        pool.run_reference(divide, by=0)
    with pytest.raises((AttributeError, TypeError), match="pickle|local"):
        pool.run(unpicklable_result)
    assert len(pool.run(world)) == 2


def test_ranks_that_may_be_out_of_step_close_the_pool_and_restart_opens_it(pool):
    before = pool.run(world)
    with pytest.raises(ValueError, match="only here"):
        pool.run(raise_on_all_but_rank_0)
    assert not pool.usable
    with pytest.raises(RuntimeError, match="only here"):
        pool.run(world)
    assert wait_until_ended([pid for _, _, pid in before]) == []
    pool.restart()
    assert len(pool.run(world)) == 2


def test_timeout_names_the_stuck_ranks_and_where_they_were(pool):
    if not pool.usable:
        pool.restart()
    with pytest.raises(RankFailure) as caught:
        pool.run(sleep_for_a_while, timeout_s=0.5)
    assert {report.kind for report in caught.value.reports} == {FailureKind.STUCK}
    assert "rank 0: did not finish within 0.5 s" in str(caught.value)
    assert "in sleep_for_a_while" in str(caught.value)
    assert not pool.usable


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("exit", FailureKind.DIED, "rank 1: ended by itself with exit code 7"),
        ("hang", FailureKind.STUCK, "rank 1: was still at work"),
    ],
)
def test_the_rank_at_fault_is_named_first_and_all_end(how, kind, text):
    with WorkerPool(2, collective_timeout_s=2, settle_s=0.5) as pool:
        pids = [pid for _, _, pid in pool.run(world)]
        with pytest.raises(RankFailure) as caught:
            pool.run(fail_on, failing_rank=1, how=how)
        assert caught.value.cause.kind is kind
        assert str(caught.value).startswith(text)
        assert "(during step 3, switch tp1 to tp2)" in str(caught.value).splitlines()[0]
        assert "rank 0: lost contact with another rank (during step 3, switch tp1 to tp1)" in str(caught.value)
        assert running(pids) == []


@pytest.mark.parametrize(
    ("how", "exit_code", "first_line"),
    [
        ("user error", 2, "error: the folder is empty: name another"),
        ("die", 1, "rank 1: killed by SIGKILL"),
    ],
)
def test_messages_and_exit_codes(start_script, how, exit_code, first_line):
    process = start_script(how)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == exit_code
    assert errors.startswith(first_line)
    if how == "user error":
        assert errors.count("\n") == 1
    assert "launch.py" not in errors, "the parent's own traceback is nobody's business"


def test_ctrl_c_ends_every_process_without_a_traceback(start_script):
    process = start_script("grandchild")
    pids = read_pids_until_ready(process)
    assert len(pids) == 3
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "interrupted\n"
    assert wait_until_ended(pids) == []


def test_ctrl_c_between_starting_a_process_and_keeping_it_in_mind(monkeypatch):
    class InterruptedProcess(worker_pool.RankProcess):
        def __init__(self, *args):
            super().__init__(*args)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(worker_pool, "RankProcess", InterruptedProcess)
    before = multiprocessing.active_children()
    with pytest.raises(KeyboardInterrupt):
        WorkerPool(2)
    assert multiprocessing.active_children() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_while_the_ranks_start(start_script):
    process = start_script("hang")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(started := children.read_text().split()) < 2:  # one of them may be multiprocessing's resource tracker
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")
    assert wait_until_ended([int(pid) for pid in started]) == []


def test_ranks_and_what_they_started_end_with_their_parent(start_script):
    process = start_script("grandchild")
    pids = read_pids_until_ready(process)
    process.kill()
    process.wait()
    assert wait_until_ended(pids) == []


def test_under_torchrun_the_function_runs_in_the_ranks_that_are_there(start_script):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", "--nproc-per-node", "2"]
    process = start_script("torchrun", "return", launcher=launcher)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.count("pid") == 2


def test_in_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not in_torchrun()
    with pytest.raises(UserError, match="number of ranks"):
        launch(world, None)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    assert in_torchrun()
    with pytest.raises(UserError, match="4 ranks"):
        launch(world, 4)


@pytest.mark.parametrize(("num_ranks", "device", "text"), [(0, "auto", "at least 1"), (2, "tpu", "auto, cpu or cuda")])
def test_pool_refuses(num_ranks, device, text):
    with pytest.raises(ValueError, match=text):
        WorkerPool(num_ranks, device=device)


def test_ranks_that_failed_alike_are_named_together():
    reports = [RankReport(label="rank 3", kind=FailureKind.DIED, summary="killed by SIGSEGV (signal 11)", time_s=9.0)]
    for rank in (0, 1):
        reports.append(
            RankReport(label=f"rank {rank}", kind=FailureKind.PEER_LOST, summary="[gloo/transport] x", time_s=rank)
        )
    assert str(RankFailure(reports[::-1])).splitlines() == [
        "rank 3: killed by SIGSEGV (signal 11)",
        "ranks 0, 1: lost contact with another rank",
    ]


def test_errors_that_a_pool_passed_on_are_told_as_on_their_rank():
    def passed_on(error, kind):
        error.__cause__ = RankFailure([RankReport(label="rank 1", kind=kind, summary="it said so")])
        return explain(error)

    assert passed_on(ValueError("x"), FailureKind.USER) == (2, "error: it said so")
    assert passed_on(KeyError("x"), FailureKind.RAISED) == (1, "rank 1: it said so")
    assert explain(KeyboardInterrupt()) == (130, "interrupted")
    assert explain(UserError("one\ntwo")) == (2, "error: one\nerror: two")
    assert explain(KeyError("x")) is None


def test_user_errors_are_told_from_bugs():
    def caught(function, *args):
        try:
            function(*args)
        except Exception as error:
            return error

    from hotspa_plugin.layout import TensorSpec

    assert is_user_error(caught(lambda: TensorSpec(name="a", shape=(1,), dtype="float13")))
    assert not is_user_error(caught(int, "three"))
    assert not is_user_error(caught(divide, 0))


def test_peer_loss_is_seen_through_wrapping_errors():
    def wrapped():
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
        except RuntimeError as error:
            raise KeyError("switch 3 failed") from error

    try:
        wrapped()
    except KeyError as error:
        assert is_peer_loss(error)
    assert not is_peer_loss(RuntimeError("shapes differ"))
