import numpy as np
import pytest

from hotspa_plugin.data import assign_batch, draw_lengths
from hotspa_plugin.search.bucket_estimate import LengthTables
from tests.search.options import option


@pytest.mark.parametrize("ranks_per_core", [1.0, 1.2, 4.0])
@pytest.mark.parametrize("spec", ["tp1", "tp2pp2", "tp4", "tp4pp4", "tp8"])
def test_close_to_a_real_assignment(spec, ranks_per_core):
    chosen = option(spec, 32, 32768, ranks_per_core=ranks_per_core)
    errors = []
    for seed in range(4):
        lengths = draw_lengths("wikipedia", 512, seed=seed, max_tokens=8192)
        (bucket,) = assign_batch(lengths, buckets=[chosen.spec], cost=chosen.cost).buckets
        real = chosen.bucket_s(bucket)
        estimate = LengthTables([lengths], [0, 8192]).bucket_s(chosen.lane)[0, 0, 1]
        errors.append(estimate / real - 1)
    assert abs(np.mean(errors)) < 0.1


def test_buckets_between_cuts():
    lane = option("tp1", 4, 4096).lane
    tables = LengthTables([np.array([100, 200, 3000]), np.array([150])], [0, 128, 1024, 4096, 8192])
    seconds = tables.bucket_s(lane)
    assert seconds.shape == (2, 5, 5)
    assert seconds[0, 0, 1] == pytest.approx(lane.cost.packed_s([100]))
    assert seconds[0, 1, 2] == pytest.approx(lane.cost.packed_s([200]))
    assert seconds[1, 0, 1] == 0.0
    assert seconds[0, 3, 4] == 0.0
    assert seconds[0, 0, 4] >= seconds[0, 2, 3] == pytest.approx(lane.cost.packed_s([3000]))


def test_what_does_not_fit_is_infinite():
    lane = option("tp1", 4, 1000).lane
    assert np.isinf(LengthTables([np.array([2000])], [0, 2000]).bucket_s(lane)[0, 0, 1])
