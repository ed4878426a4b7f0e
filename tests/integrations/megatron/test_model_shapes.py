"""How tensors are cut: vocabulary, gate and up, query groups, tied embeddings, norms. And what is refused."""

import pytest

from hotspa_plugin.integrations.megatron.verify import verify_case
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase, make_spec

from .checks import NARROW, check, mostly_slow

LENGTHS = ((7, 40, 1, 64, 100), (5, 33))


@pytest.mark.parametrize(
    ("vocab_size", "divisible_by", "pool", "padded"),
    [
        (50257, 1, "tp1:64 tp2:128", 50258),
        (151936, 1, "tp1:64 tp2:128", 151936),
        (50257, 128, "tp1:64 tp2:128", 50432),
        (101, 1, "tp1:64 tp4:128 tp2:256", 104),
    ],
)
def test_one_padded_vocabulary_for_the_pool(vocab_size, divisible_by, pool, padded):
    case = VerifyCase(pool=pool, vocab_size=vocab_size, make_vocab_size_divisible_by=divisible_by)
    assert make_spec(case, 4)[1].padded_vocab_size == padded


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", mostly_slow("tiny-llama", "tiny-gpt"))
@pytest.mark.parametrize("vocab_size", mostly_slow(101, 127, 128))
def test_vocabulary_that_tp_does_not_divide(workers, model, vocab_size):
    check(workers, "tp1:32 tp2:64 tp4:128", model=model, vocab_size=vocab_size, lengths=LENGTHS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("home", mostly_slow("tp2", "tp1", "tp4"))
@pytest.mark.parametrize("packing", mostly_slow("packed", "padded"))
def test_gate_and_up_are_cut_apart(workers, home, packing):
    check(workers, "tp1:32 tp2:64 tp4:128", home=home, packing=packing, model_changes=NARROW, lengths=LENGTHS)


@pytest.mark.slow
@pytest.mark.ranks(6)
@pytest.mark.parametrize(
    ("pool", "home"),
    [
        ("tp1:32 tp2:64 tp3:128", None),
        ("tp3nosp:32 tp1:64 tp2:128", "tp1"),
        ("tp1:32 tp6:64 tp3pp2:128", "tp6"),
        ("tp2:32 tp3:64 pp2:128", "tp3"),
    ],
)
@pytest.mark.parametrize("activation", mostly_slow("swiglu", "gelu"))
def test_tp_3_beside_tp_2(workers, pool, home, activation):
    """A third and a half of one tensor overlap in pieces of a sixth."""
    changes = {**NARROW, "num_query_groups": 6, "activation": activation}
    check(workers, pool, home=home, model_changes=changes, lengths=LENGTHS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_query_groups", mostly_slow(2, 1))
@pytest.mark.parametrize("home", mostly_slow("tp4", "tp1", "tp4nosp"))
def test_fewer_query_groups_than_tp(workers, num_query_groups, home):
    pool = "tp1:16 tp2:32 tp4:64 tp4nosp:128"
    check(workers, pool, home=home, model_changes={"num_query_groups": num_query_groups}, lengths=LENGTHS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("pool", "home"),
    [
        ("tp1:32 pp2:128", "pp2"),
        ("tp1:32 pp2:128", "tp1"),
        ("pp2:32 tp2pp2:64 tp2:128", "tp2pp2"),
        ("pp4:32 pp2:64 tp2pp2:128", "pp4"),
        ("tp1:32 pp4:64 tp4nosp:128", "tp4nosp"),
    ],
)
@pytest.mark.parametrize(
    "model",
    mostly_slow({"preset": "tiny-gpt"}, {"preset": "tiny-llama", "tied_embeddings": True}),
    ids=["learned", "rope"],
)
def test_tied_embeddings_on_one_and_two_stages(workers, pool, home, model):
    check(workers, pool, home=home, model=model["preset"], model_changes=model, lengths=LENGTHS,
          distributed_optimizer=home == "pp2")  # fmt: skip


@pytest.mark.ranks(4)
def test_untied_embeddings_stay_apart(workers):
    check(workers, "tp1:32 pp2:64 tp2:128", model="tiny-gpt", model_changes={"tied_embeddings": False}, lengths=LENGTHS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("home", mostly_slow("tp2nosp", "tp1", "tp2", "tp4nosp"))
@pytest.mark.parametrize("norm", mostly_slow("rmsnorm", "layernorm"))
def test_query_and_key_norms(workers, home, norm):
    """Every rank's heads give a part of these norms' gradients, with and without sequence parallelism."""
    changes = {"qk_layernorm": True, "norm": norm, "num_layers": 2}
    check(workers, "tp1:16 tp2:32 tp2nosp:64 tp4nosp:128", home=home, model_changes=changes, lengths=LENGTHS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("pool", mostly_slow("tp4:64 tp2nosp:128", "tp1:64 tp2:128", "tp1:64 tp2nosp:128",
                                             "tp2:64 tp2nosp:128", "tp2nosp:64 tp2:128"))  # fmt: skip
def test_norms_over_five_steps(workers, pool):
    """Copies neither drift apart nor count twice, with sequence parallelism on either side of a switch or on none."""
    lengths = ((7, 100), (64, 65), (3, 90, 80), (30,), (120,))
    check(workers, pool, model="tiny-gpt", lengths=lengths, lr=1e-2)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("policy", mostly_slow("new_greedy", "balanced"))
def test_two_nodes(workers, policy):
    """Pieces may enter a node once and be passed on; gradients are summed on the way back."""
    check(workers, "tp1:16 tp2:32 pp2:64 tp4:128", home="tp2", model="tiny-gpt", ranks_per_node=2, policy=policy,
          lengths=LENGTHS)  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pool": "tp1:64 pp2:128", "model_changes": {"num_layers": 5}}, ["5 layers", "pp sizes that fit: 1, 5"]),
        ({"pool": "tp1:64 tp3:128"}, ["tp*pp*cp = 3", "world size 4"]),
        (
            {"pool": "tp4:128", "model_changes": {"num_attention_heads": 6, "hidden_size": 96}},
            ["tp 4", "6 attention heads"],
        ),
        ({"pool": "tp1:64 tp2:128", "lengths": ((5, 129),)}, ["129", "128"]),
    ],
    ids=["layers", "ranks", "heads", "length"],
)
def test_what_does_not_fit_is_refused_by_every_rank(workers, changes, said):
    with pytest.raises(ValueError) as error:
        verify_case(workers, VerifyCase(**{"lengths": ((5,),), **changes}))
    assert all(part in str(error.value) for part in said), error.value
    assert "\n" not in str(error.value)
    assert workers.usable
