"""Rank processes for the DeepSpeed tests, started once; skipped where DeepSpeed or transformers is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from hotspa_plugin.runtime.worker_pool import WorkerPool

MISSING = [name for name in ("deepspeed", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def _workers() -> Iterator[WorkerPool]:
    with WorkerPool(4, extra_reference=True, device="cpu", env={"DS_ACCELERATOR": "cpu"}) as workers:
        yield workers


@pytest.fixture
def workers(_workers: WorkerPool) -> WorkerPool:
    if not _workers.usable:  # a test before has broken it
        _workers.restart()
    return _workers
