"""Items of data sets as sequences."""

import numpy as np
import pytest

pytest.importorskip("megatron.core")
from hotspa_plugin.integrations.megatron.megatron_training import data


def item(loss_mask, **more):
    tokens = np.arange(1, len(loss_mask) + 1)
    return {"tokens": tokens, "labels": tokens + 100, "loss_mask": np.array(loss_mask, dtype=np.float32), **more}


def test_an_item_ends_behind_its_last_target():
    (sequence,) = data.sequences_of(item([0, 1, 0, 1, 0, 0]))
    assert sequence.tokens.tolist() == [1, 2, 3, 4]
    assert sequence.loss_mask.tolist() == [0, 1, 0, 1]


def test_an_item_without_targets_keeps_one_token():
    (sequence,) = data.sequences_of(item([0, 0, 0]))
    assert sequence.tokens.tolist() == [1]
    assert sequence.loss_mask.sum() == 0


def test_a_pack_is_its_segments():
    bounds = np.array([0, 2, 5, 8, 8, 8])
    sequences = data.sequences_of(item([1, 1, 0, 1, 0, 0, 0, 0], cu_seqlens=bounds))
    assert [s.tokens.tolist() for s in sequences] == [[1, 2], [3, 4]]
    assert [s.labels.tolist() for s in sequences] == [[101, 102], [103, 104]]


@pytest.mark.parametrize(("policy", "lengths"), [("truncate", [3]), ("split", [3, 3, 1]), ("drop", [])])
def test_overlong_samples(policy, lengths):
    sequences = data.limited(data.sequences_of(item([1] * 7)), 3, policy)
    assert [len(s) for s in sequences] == lengths == data.limited_lengths(7, 3, policy)
    if policy == "split":
        assert np.concatenate([s.labels for s in sequences]).tolist() == list(range(101, 108))


def test_an_overlong_sample_is_an_error_that_names_the_flags():
    with pytest.raises(ValueError, match="7 tokens, over the last bound of --hotspa-pool, 3: .*--hotspa-overlong"):
        data.limited(data.sequences_of(item([1] * 7)), 3, "error")
