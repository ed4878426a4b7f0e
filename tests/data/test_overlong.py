"""Sequences over the last bound: refused by name unless a policy was chosen, and then counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_plugin.data import LimitedSource, TokenArraySource


def source_of(lengths):
    first = np.cumsum(lengths) - lengths
    return TokenArraySource(
        [np.arange(start, start + n) for start, n in zip(first, lengths)],
        vocab_size=int(sum(lengths)),
        names=[f"text {i}" for i in range(len(lengths))],
    )


def test_error_names_sample_length_and_bound():
    with pytest.raises(
        ValueError, match=r"text 1: has 9 tokens, over the last bound of 8 \(2 sequences are, the longest has 30"
    ):
        LimitedSource(source_of([8, 9, 30]), bound_tokens=8)
    assert LimitedSource(source_of([8, 7]), bound_tokens=8).counts.num_overlong == 0


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), bound=st.integers(1, 45))
def test_policies_keep_what_they_say(lengths, bound):
    source = source_of(lengths)
    over = [n for n in lengths if n > bound]

    split = LimitedSource(source, bound_tokens=bound, policy="split")
    assert np.concatenate([split.tokens(i) for i in range(len(split.lengths))]).tolist() == list(range(sum(lengths)))
    assert split.counts.num_dropped_tokens == 0 and split.counts.num_pieces == sum(-(-n // bound) for n in over)

    cut = LimitedSource(source, bound_tokens=bound, policy="truncate")
    assert cut.lengths.tolist() == [min(n, bound) for n in lengths]
    assert cut.counts.num_dropped_tokens == sum(n - bound for n in over)
    assert all(np.array_equal(cut.tokens(i), source.tokens(i)[:bound]) for i in range(len(lengths)))

    if len(over) < len(lengths):
        dropped = LimitedSource(source, bound_tokens=bound, policy="drop")
        assert dropped.lengths.tolist() == [n for n in lengths if n <= bound]
        assert dropped.counts.num_dropped_tokens == sum(over) and dropped.counts.num_pieces == 0
    else:
        with pytest.raises(ValueError, match="would be dropped"):
            LimitedSource(source, bound_tokens=bound, policy="drop")

    for view in (split, cut):
        assert view.counts.num_overlong == len(over) and view.lengths.max() <= bound
        assert all(len(view.tokens(i)) == view.lengths[i] for i in range(len(view.lengths)))


def test_names_counts_and_fingerprints():
    source = source_of([3, 20])
    views = {policy: LimitedSource(source, bound_tokens=8, policy=policy) for policy in ("truncate", "split", "drop")}
    assert [views["split"].name(i) for i in range(4)] == [
        "text 0",
        "text 1 tokens 0 to 8",
        "text 1 tokens 8 to 16",
        "text 1 tokens 16 to 20",
    ]
    assert [str(views[policy].counts) for policy in views] == [
        "1 sequences over 8 tokens: cut to it, leaving out 12 tokens",
        "1 sequences over 8 tokens: split into 3 sequences",
        "1 sequences over 8 tokens: left out, 20 tokens in all",
    ]
    assert len({view.fingerprint() for view in views.values()} | {source.fingerprint()}) == 4
    assert str(LimitedSource(source, bound_tokens=20).counts) == "no sequence is over 20 tokens"
    with pytest.raises(ValueError, match="choose error, truncate, split or drop"):
        LimitedSource(source, bound_tokens=8, policy="cut")
