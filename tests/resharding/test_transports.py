"""One conformance suite over all transports."""

import pytest
import torch

from hotspa_plugin.resharding.transports import LoopbackWorld, Message
from tests.resharding import transport_cases
from tests.resharding.gloo_ranks import run


@pytest.mark.parametrize("case", transport_cases.CASES)
@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_loopback(case, num_ranks):
    world = LoopbackWorld(num_ranks)
    parts = [case(rank, num_ranks, torch.device("cpu")) for rank in range(num_ranks)]
    works = [world.transport(rank).exchange(*part[:2]) for rank, part in enumerate(parts)]
    for work, part in zip(works, parts, strict=True):
        work.wait()
        transport_cases.check(case, part)
    world.assert_empty()


def test_gloo(tmp_path):
    torch.multiprocessing.spawn(run, args=(4, "gloo", str(tmp_path / "rendezvous")), nprocs=4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl(tmp_path):
    count = torch.cuda.device_count()
    torch.multiprocessing.spawn(run, args=(count, "nccl", str(tmp_path / "rendezvous")), nprocs=count)


def test_loopback_says_what_is_missing():
    world = LoopbackWorld(2)
    work = world.transport(1).exchange([], [Message(0, torch.zeros(3))])
    with pytest.raises(RuntimeError, match="rank 1 waits for a message that rank 0 has not sent"):
        work.wait()
    world.post(0, 1, torch.zeros(2))
    with pytest.raises(RuntimeError, match="expects 3 elements"):
        work.wait()
    world.post(0, 1, torch.zeros(2))
    with pytest.raises(AssertionError, match="nobody received"):
        world.assert_empty()
