"""What a rank is certain to hold, counted by hand."""

import pytest

from hotspa_plugin.cost.resident import num_parameters, resident_memory
from hotspa_plugin.layout.analytic import GPTSizes
from hotspa_plugin.strategy import StrategyPool

SIZES = GPTSizes(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=16,
    num_attention_heads=2,
    vocab_size=10,
    gated_mlp=False,
    dtype="float32",
)
# Per layer: qkv 3*8*8, projection 8*8, both MLP matrices 2*8*16, two norms of 8; embedding and output 10*8, last norm.
LAYER = 192 + 64 + 256 + 16
WHOLE = 2 * LAYER + 2 * 80 + 8


def memory_of(pool, **changes):
    options = {"distributed_optimizer": False, "staging_bytes": 100, **changes}
    return resident_memory(SIZES, StrategyPool.parse(pool).check(world_size=4), **options)


def test_a_models_parameters_are_counted_once():
    assert num_parameters(SIZES) == WHOLE


def test_home_holds_parameters_gradients_and_both_moments():
    (static,) = memory_of("tp1:64")
    assert (static.home_bytes, static.slab_bytes, static.staging_bytes) == (WHOLE * 16, 0, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_another_strategy_adds_parameters_and_gradients_of_its_own_fullest_rank(tp):
    other, home = memory_of(f"tp{tp}:64 pp2:128")
    stage = LAYER + 80 + 8  # the last stage has the output layer and the last norm
    assert home.home_bytes == other.home_bytes == stage * 16
    norms = 2 * 16 + 8
    assert other.slab_bytes == (norms + (WHOLE - norms) // tp) * 8
    assert other.total_bytes == other.home_bytes + other.slab_bytes + 100
    assert home.slab_bytes == 0


def test_what_overlaps_stands_beside_each_strategy():
    plain = memory_of("tp2:64 tp1:96 pp2:128")
    flushing = memory_of("tp2:64 tp1:96 pp2:128", overlap_flush=True)
    both = memory_of("tp2:64 tp1:96 pp2:128", overlap_flush=True, overlap_prefetch=True)
    norms = 2 * 16 + 8
    half = norms + (WHOLE - norms) // 2
    assert [b.slab_bytes - a.slab_bytes for a, b in zip(plain, flushing, strict=True)] == [
        WHOLE * 4,
        half * 4,
        WHOLE * 4,
    ]
    assert [b.slab_bytes - a.slab_bytes for a, b in zip(flushing, both, strict=True)] == [WHOLE * 4, half * 4, 0]


def test_a_distributed_optimizer_shares_only_its_state():
    (static,) = memory_of("tp1:64", distributed_optimizer=True)
    assert static.home_bytes == WHOLE * (4 + 4 + 8 // 4)
