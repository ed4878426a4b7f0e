"""What a batch may be, and what becomes of overlong samples. No ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hotspa_plugin.data import Sample
from hotspa_plugin.integrations.deepspeed.batches import limit_lengths, to_samples

LONG = [*range(10, 21)]  # 11 tokens
LABELS = [-100, -100, *LONG[2:]]


def as_rows(samples: list[Sample]) -> list[list[list[float]]]:
    return [[s.tokens.tolist(), s.labels.tolist(), s.loss_mask.tolist()] for s in samples]


@pytest.mark.parametrize(
    ("policy", "pieces"),
    [("truncate", [slice(0, 4)]), ("split", [slice(0, 4), slice(4, 8), slice(8, 12)]), ("drop", [])],
)
@pytest.mark.parametrize("labelled", [False, True])
def test_overlong_samples_are_as_if_the_user_had_cut_them(policy, pieces, labelled):
    def sample(part: slice) -> object:
        return {"input_ids": LONG[part], "labels": LABELS[part]} if labelled else LONG[part]

    batch = [[1, 2, 3, 4], sample(slice(None)), [5, 6]]
    cut = [[1, 2, 3, 4], *map(sample, pieces), [5, 6]]
    limited = limit_lengths(to_samples(batch), bound_tokens=4, policy=policy)
    assert as_rows(limited) == as_rows(to_samples(cut))


def test_overlong_sample_is_named():
    with pytest.raises(ValueError, match=r"sample 1: 11 tokens are over the last bound, 4: .* hotspa.overlong"):
        limit_lengths(to_samples([[1], LONG]), bound_tokens=4, policy="error")


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_rows_of_any_kind(kind):
    rows = [[1, 2, 3], [4, 5, 6]]
    assert as_rows(to_samples(kind(rows))) == as_rows([Sample.from_tokens(row) for row in rows])
    assert as_rows(to_samples({"input_ids": kind(rows)})) == as_rows(to_samples(rows))
    assert as_rows(to_samples([kind(row) for row in rows])) == as_rows(to_samples(rows))


def test_labels_stand_at_the_token_they_name():
    (sample,) = to_samples([{"input_ids": [7, 8, 9], "labels": [-100, 8, -100]}])
    assert as_rows([sample]) == [[[7, 8, 9], [8, 0, 0], [1, 0, 0]]]
