"""Rank processes that live across the tests of this folder, one pool at a time."""

import pytest

from hotspa_plugin.runtime.worker_pool import WorkerPool

# What says most about another megatron-core; the other tests with ranks run under it in make test-all.
EVERYWHERE = {"test_verify.py", "test_training.py", "test_faults.py", "test_evaluation.py", "test_damage.py"}


def pytest_collection_modifyitems(items):
    """Groups these tests by their number of ranks, so that each pool starts once."""
    for item in items:
        if item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.gloo)
            if item.path.name not in EVERYWHERE:
                item.add_marker(pytest.mark.newest)
    items.sort(key=_num_ranks)  # stable: tests without ranks come first, in their order


def _num_ranks(item):
    marker = item.get_closest_marker("ranks")
    return marker.args[0] if marker else 0


class _Pools:
    """The one pool that is alive."""

    def __init__(self):
        self._pool = None

    def of(self, num_ranks):
        if self._pool is not None and self._pool.num_ranks != num_ranks:
            self.close()
        if self._pool is None:
            # One thread each: many ranks share few cores, and sums come out the same on every machine.
            self._pool = WorkerPool(num_ranks, extra_reference=True, device="cpu", env={"OMP_NUM_THREADS": "1"})
        elif not self._pool.usable:
            self._pool.restart()
        return self._pool

    def close(self):
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@pytest.fixture(scope="session")
def _pools():
    pools = _Pools()
    yield pools
    pools.close()


@pytest.fixture
def workers(_pools, request):
    """The pool of as many ranks as the test's ``ranks`` mark says, with a one-process reference."""
    return _pools.of(_num_ranks(request.node))
