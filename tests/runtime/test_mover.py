"""Moves in the background: additions wait at the gate, and happen in full when it opens."""

import time

import pytest
import torch

from hotspa_plugin.resharding import build_flush_plan, build_switch_plan
from hotspa_plugin.resharding.executor import ReshardExecutor
from hotspa_plugin.resharding.transports import LoopbackWorld
from hotspa_plugin.runtime.mover import BackgroundMover, Gate, InlineMover
from tests.resharding.worlds import LLAMA, layout, local_tensors

CPU = torch.device("cpu")


def flush_within_a_rank():
    """An executor whose additions all stay on their rank, and what it adds to what."""
    home, strategy = layout(LLAMA, 2, 1, 1), layout(LLAMA, 2, 1, 1)
    plan = build_flush_plan(strategy, home, build_switch_plan(home, strategy))
    gradients, accumulators = local_tensors(strategy, 0, torch.float32, 3.0), local_tensors(home, 0, torch.float32, 1.0)
    executor = ReshardExecutor(plan, 0, LoopbackWorld(2).transport(0), gradients, accumulators)
    assert executor.moved.sent_bytes == 0 < executor.moved.local_bytes
    return executor, accumulators


def wait_for(condition, limit_s=30.0):
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def test_additions_wait_for_the_gate():
    executor, accumulators = flush_within_a_rank()
    gate = Gate(CPU)
    gate.close()
    move = BackgroundMover().submit(executor, gate)
    wait_for(lambda: move.busy)  # it has come to the gate
    assert all((tensor == 1).all() for tensor in accumulators.values())
    gate.open()
    move.wait()
    assert all((tensor == 4).all() for tensor in accumulators.values())
    (first, second) = move.busy
    assert first[0] <= first[1] <= second[0] <= second[1]


def test_moves_keep_their_order():
    mover, gate = BackgroundMover(), Gate(CPU)
    (one, held), (other, free) = flush_within_a_rank(), flush_within_a_rank()
    gate.close()
    first, second = mover.submit(one, gate), mover.submit(other)
    wait_for(lambda: first.busy)
    assert not second.busy and all((tensor == 1).all() for tensor in free.values())
    gate.open()
    second.wait()
    first.wait()
    assert all((tensor == 4).all() for tensors in (held, free) for tensor in tensors.values())


@pytest.mark.parametrize("mover", [InlineMover(), BackgroundMover()])
def test_an_open_gate_holds_nothing_back(mover):
    executor, accumulators = flush_within_a_rank()
    for turn in range(1, 4):
        mover.submit(executor, Gate(CPU)).wait()
        assert all((tensor == 1 + 3 * turn).all() for tensor in accumulators.values())
