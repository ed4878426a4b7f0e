import numpy as np
import pytest

from hotspa_plugin.cost import MicroBatchCost
from hotspa_plugin.cost.fitting import fit_memory, fit_time, memory_error, time_error

LENGTHS = [128, 512, 1024, 4096]


@pytest.mark.parametrize(("a", "b", "c"), [(2e-9, 3e-5, 5e-3), (0.0, 3e-5, 0.0), (1e-8, 0.0, 1e-3)])
def test_exact_times_are_recovered(a, b, c):
    true = MicroBatchCost(a_s_per_token2=a, b_s_per_token=b, c_s=c)
    fitted = fit_time(LENGTHS, [true.packed_s([n]) for n in LENGTHS])
    unseen = [200, 700, 3000]
    assert time_error(fitted, unseen, [true.packed_s([n]) for n in unseen]) < 1e-6


def test_noise_moves_a_fit_by_no_more_than_itself():
    true = MicroBatchCost(a_s_per_token2=2e-9, b_s_per_token=3e-5, c_s=5e-3)
    generator = np.random.RandomState(0)
    for _ in range(20):
        noisy = [true.packed_s([n]) * (1 + generator.uniform(-0.05, 0.05)) for n in LENGTHS]
        fitted = fit_time(LENGTHS, noisy)
        assert min(fitted.a_s_per_token2, fitted.b_s_per_token, fitted.c_s) >= 0
        for n in (300, 2000):
            assert fitted.packed_s([n]) == pytest.approx(true.packed_s([n]), rel=0.1)


def test_short_lengths_count_as_much_as_long_ones():
    # a step at short lengths would vanish beside the long ones if absolute errors counted
    true = MicroBatchCost(a_s_per_token2=1e-8, b_s_per_token=1e-5, c_s=2e-3)
    fitted = fit_time(LENGTHS, [true.packed_s([n]) for n in LENGTHS])
    assert fitted.packed_s([16]) == pytest.approx(true.packed_s([16]), rel=1e-6)


def test_too_little_or_impossible_measurements_are_refused():
    with pytest.raises(ValueError, match="two lengths"):
        fit_time([128, 128], [1.0, 1.0])
    with pytest.raises(ValueError, match="positive times"):
        fit_time([128, 256], [0.0, 1.0])


def test_memory_is_a_rising_line():
    line = fit_memory(LENGTHS, [1e6 + 5e3 * n for n in LENGTHS])
    assert line.predict([2000])[0] == pytest.approx(1e6 + 5e3 * 2000)
    flat = fit_memory(LENGTHS, [5e6 - 10 * n for n in LENGTHS])
    assert flat.fixed_bytes > 0 and flat.bytes_per_token > 0
    assert memory_error(line, [2000], [1e6 + 5e3 * 2000], resident_bytes=1e6) == pytest.approx(0.0, abs=1e-9)
    assert memory_error(line, [2000], [2e7], resident_bytes=0.0) == pytest.approx(1 - 1.1e7 / 2e7)
