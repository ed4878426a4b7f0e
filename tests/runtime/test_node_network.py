"""Two throttled nodes on one machine. Needs root; skipped elsewhere."""

import os
import shutil
import subprocess
import time

import pytest

from hotspa_plugin.runtime.node_network import ThrottledNodes
from hotspa_plugin.runtime.worker_pool import WorkerPool

MBIT = 80
NUM_BYTES = 4 * 10**6


def namespaces_work():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return False
    try:
        with ThrottledNodes(link_mbit=MBIT):
            return True
    except ValueError:
        return False


def exchange(peers):
    """Seconds of swapping ``NUM_BYTES`` with a peer."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    sent, received = torch.ones(NUM_BYTES // 4), torch.empty(NUM_BYTES // 4)
    seconds = []
    for _ in range(2):
        dist.barrier()
        started_s = time.perf_counter()
        operations = [dist.P2POp(dist.isend, sent, peers[rank]), dist.P2POp(dist.irecv, received, peers[rank])]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        seconds.append(time.perf_counter() - started_s)
    return min(seconds), float(received.sum())


def test_ranks_divide_evenly():
    nodes = ThrottledNodes(link_mbit=10)
    first, second, third, fourth = nodes.networks(4)
    assert first == second != third == fourth
    assert first.store_address == fourth.store_address
    with pytest.raises(ValueError, match="3 ranks do not divide among 2 nodes"):
        nodes.networks(3)
    with pytest.raises(ValueError, match="above 0"):
        ThrottledNodes(link_mbit=0)


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="need the program ip: install iproute2"), ThrottledNodes(link_mbit=10):
        pass


@pytest.mark.gloo
@pytest.mark.skipif(not namespaces_work(), reason="needs root and network namespaces")
def test_what_crosses_nodes_is_throttled_and_nothing_is_left_behind():
    with ThrottledNodes(link_mbit=MBIT) as nodes:
        with WorkerPool(4, device="cpu", networks=nodes.networks(4), env={"OMP_NUM_THREADS": "1"}) as workers:
            inside = workers.run(exchange, peers=[1, 0, 3, 2])
            across = workers.run(exchange, peers=[2, 3, 0, 1])
        assert all(total == NUM_BYTES / 4 for _, total in (*inside, *across))
        # two pairs share the link: at least twice one exchange, less what a burst lets through
        wire_s = 2 * NUM_BYTES * 8 / (MBIT * 1e6)
        assert min(seconds for seconds, _ in across) > 0.4 * wire_s
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        assert nodes.namespaces[0] in listed
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert not any(namespace in listed for namespace in nodes.namespaces)
