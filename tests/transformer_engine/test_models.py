"""Models of real TransformerEngine layers: their layouts, and switches between them, bit for bit.

TransformerEngine takes about 20 minutes to install without a GPU, so these tests run with ``make test-te`` only.
"""

import importlib.util

import pytest

from hotspa_plugin.runtime.worker_pool import WorkerPool
from tests.transformer_engine.work import MODELS

pytestmark = [pytest.mark.te, pytest.mark.gloo]
POOLS = ["tp1:16 tp2:32 tp4:64", "tp1:16 pp2:32 tp2pp2:64", "pp4:16 tp4:32 pp2:64"]


@pytest.fixture(scope="module")
def ranks():
    assert importlib.util.find_spec("transformer_engine"), "make test-te installs it"
    with WorkerPool(4, device="cpu", env={"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}) as pool:
        yield pool


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model", MODELS)
def test_layouts_are_those_of_megatron_s_local_layers(ranks, model, pool):
    if model == "grouped experts":
        pytest.skip("Megatron has no local layer of grouped experts")
    for rank, strategies in enumerate(
        ranks.run("tests.transformer_engine.work:compare_layouts", pool=pool, model=model)
    ):
        for found in strategies:
            where = f"rank {rank}, {found['strategy']}"
            of_engine, of_local = found["engine layers"]
            assert of_engine >= 3, where
            assert of_local == 0, where
            assert found["tensors"] == found["expected tensors"], where
            assert found["regions"] == found["expected regions"], where


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("model", MODELS)
def test_switches_and_flushes_are_exact(ranks, model, pool):
    trips = ranks.run("tests.transformer_engine.work:switch_and_flush", pool=pool, model=model)[0]
    assert len(trips) == 2
    assert any(trip.remote_bytes > 0 for trip in trips)
    for trip in trips:
        assert trip.num_tensors > 20
        assert not trip.wrong, trip
        assert not trip.differing, trip
        assert not trip.wrong_gradients, trip
