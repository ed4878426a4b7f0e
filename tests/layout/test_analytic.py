"""Analytic GPT layouts: every element covered, copies marked, halves of a gated MLP cut apart."""

import numpy as np
import pytest

from hotspa_plugin.layout import GPTSizes, gpt_layout

SIZES = GPTSizes(num_layers=4, hidden_size=12, ffn_hidden_size=24, num_attention_heads=12, vocab_size=50)


def coverage(layout):
    """How many (data-parallel replicas, copies) hold each element."""
    counts = [np.zeros(spec.shape, dtype=int) for spec in layout.tensors]
    for rank in range(layout.num_ranks):
        for s in layout.shards(rank):
            box = tuple(slice(a, b) for a, b in zip(s.region.low, s.region.high, strict=True))
            counts[s.tensor][box] += s.tp_copy == 0 and s.stage_copy == 0
    return counts


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 2), (2, 2, 1), (3, 4, 1), (4, 1, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_each_replica_covers_everything_once(tp, pp, dp, tied):
    sizes = GPTSizes(**{**SIZES.__dict__, "tied_embeddings": tied, "biases": True, "num_learned_positions": 7})
    layout = gpt_layout(sizes, tp=tp, pp=pp, dp=dp, vocab_divisor=12)
    assert all((count == dp).all() for count in coverage(layout))
    assert len(layout.holdings) == tp * pp
    assert layout.num_ranks == tp * pp * dp
    second = [s for h in layout.holdings for s in h if s.stage_copy]
    assert bool(second) == (tied and pp > 1)


def test_gate_and_up_are_cut_separately():
    layout = gpt_layout(SIZES, tp=3, pp=1, dp=1, vocab_divisor=12)
    fc1 = [spec.name for spec in layout.tensors].index("decoder.layers.mlp.linear_fc1.weight")
    shards = [s for s in layout.shards(1) if s.tensor == fc1 and s.region.low[0] == 2]
    assert [(s.region.low[1], s.region.high[1]) for s in shards] == [(8, 16), (32, 40)]
    assert [s.storage_offset for s in shards] == [0, 8 * 12]
    assert shards[0].parameter == shards[1].parameter == "decoder.layers.2.mlp.linear_fc1.weight"


def test_rank_order_is_tensor_then_data_then_pipeline():
    layout = gpt_layout(SIZES, tp=2, pp=2, dp=3, vocab_divisor=12)
    assert layout.dp_rank.tolist() == [0, 0, 1, 1, 2, 2] * 2
    assert layout.holding_of_rank.tolist() == [0, 1] * 3 + [2, 3] * 3


def test_padded_vocabulary_and_uneven_stages():
    assert SIZES.padded_vocab_size(12) == 60
    assert GPTSizes(**{**SIZES.__dict__, "vocab_size": 151936}).padded_vocab_size(2) == 151936
    layout = gpt_layout(SIZES, tp=1, pp=2, dp=1, layers_of_stage=(3, 1))
    qkv = [spec.name for spec in layout.tensors].index("decoder.layers.self_attention.linear_qkv.weight")
    assert [sum(s.tensor == qkv for s in layout.shards(r)) for r in range(2)] == [3, 1]


def test_what_does_not_divide_is_named():
    with pytest.raises(ValueError, match="4 layers do not divide by pp 3"):
        gpt_layout(SIZES, tp=1, pp=3, dp=1)
    with pytest.raises(ValueError, match="word_embeddings.weight: dim 0 of 50 elements does not divide by tp 4"):
        gpt_layout(SIZES, tp=4, pp=1, dp=1)
    with pytest.raises(ValueError, match="layers_of_stage"):
        gpt_layout(SIZES, tp=1, pp=2, dp=1, layers_of_stage=(3, 2))
