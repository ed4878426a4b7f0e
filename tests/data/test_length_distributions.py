"""Drawn lengths follow what was asked for, and repeat."""

import gzip

import numpy as np
import pytest

from hotspa_plugin.data import draw_lengths, read_lengths, wikipedia_histogram


def test_wikipedia_follows_its_histogram_in_sequences_and_tokens():
    histogram = wikipedia_histogram()
    lengths = draw_lengths("wikipedia", 400_000, seed=1)
    assert lengths.min() >= 1 and abs(lengths.mean() / histogram["mean"] - 1) < 0.03
    for bin in histogram["bins"][:10]:
        inside = lengths[(lengths > bin["over_tokens"]) & (lengths <= bin["up_to_tokens"])]
        assert 100 * len(inside) / len(lengths) == pytest.approx(bin["percent_of_sequences"], rel=0.1)
        assert 100 * inside.sum() / lengths.sum() == pytest.approx(bin["percent_of_tokens"], rel=0.12)


def test_other_distributions(tmp_path):
    uniform = draw_lengths("uniform:3-5", 1000)
    assert set(uniform.tolist()) == {3, 4, 5}
    lognormal = draw_lengths("lognormal:400,1.0", 20_000)
    assert np.median(lognormal) == pytest.approx(400, rel=0.05)
    assert np.log(lognormal).std() == pytest.approx(1.0, rel=0.05)
    (tmp_path / "lengths.txt").write_text("7\n\n129\n1\n")
    assert set(draw_lengths(f"file:{tmp_path}/lengths.txt", 100).tolist()) == {1, 7, 129}
    assert draw_lengths("uniform:3-500", 100, max_tokens=100).max() == 100
    assert draw_lengths("uniform:3-5", 0).shape == (0,)


def test_draws_repeat_by_seed():
    for spec in ("wikipedia", "uniform:1-1000", "lognormal:100,1"):
        first, again, other = (draw_lengths(spec, 50, seed=seed) for seed in (0, 0, 1))
        assert first.dtype == np.int64 and np.array_equal(first, again) and not np.array_equal(first, other)


def test_lengths_are_read_in_order(tmp_path):
    with gzip.open(tmp_path / "lengths.gz", "wt") as file:
        file.write("7\n129\n1\n64\n")
    assert read_lengths(tmp_path / "lengths.gz").tolist() == [7, 129, 1, 64]


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "wiki",
        "wikipedia:3",
        "uniform:5-3",
        "uniform:0-3",
        "uniform:5",
        "lognormal:3",
        "lognormal:0,1",
        "file:",
        "uniform:a-b",
    ],
)
def test_bad_specs_are_refused(spec):
    with pytest.raises(ValueError, match="length distribution .*use wikipedia, uniform:LOW-HIGH"):
        draw_lengths(spec, 10)


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none: cannot be read"):
        read_lengths(tmp_path / "none")
    (tmp_path / "bad").write_text("3\n0\n")
    with pytest.raises(ValueError, match="bad:2: '0' is not a length"):
        read_lengths(tmp_path / "bad")
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="empty: holds no lengths"):
        read_lengths(tmp_path / "empty")
