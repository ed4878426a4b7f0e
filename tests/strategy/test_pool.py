import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hotspa_plugin.strategy import ModelShape, ParallelStrategy, StrategyPool, padded_vocab_size

SPEC = "tp1:4096 tp2pp2:16384 tp4pp2:32768"


def shape(**changes):
    sizes = dict(
        num_layers=8, hidden_size=64, ffn_hidden_size=128, num_attention_heads=8, num_query_groups=8, vocab_size=256
    )
    return ModelShape(**(sizes | changes))


def message(error):
    text = str(error.value)
    assert "\n" not in text
    return text


def test_parse_and_write():
    pool = StrategyPool.parse(SPEC)
    assert str(pool) == SPEC
    assert pool.bounds_tokens == (4096, 16384, 32768)
    assert pool.home == ParallelStrategy(tp=4, pp=2)
    assert pool.home_index == 2
    assert StrategyPool.parse("tp1:64,tp2:128", home="tp1").home_index == 0
    assert pool.index_of("pp2tp2") == 1


@pytest.mark.parametrize(
    "text",
    [
        '"tp1:4096 tp2pp2:16384 tp4pp2:32768"',
        "[tp1:4096, tp2pp2:16384, tp4pp2:32768]",
        "- tp1: 4096\n- tp2pp2: 16384\n- tp4pp2: 32768",
        "tp1: 4096\ntp2pp2: 16384\ntp4pp2: 32768",
        "- {strategy: tp1, bound_tokens: 4096}\n- tp2pp2:16384\n- {strategy: tp4pp2, bound_tokens: 32768}",
        "entries: {tp1: 4096, tp2pp2: 16384, tp4pp2: 32768}\nhome: tp4pp2",
    ],
)
def test_yaml_says_the_same_as_text(text):
    assert StrategyPool.from_config(yaml.safe_load(text)) == StrategyPool.parse(SPEC)


def test_yaml_home():
    config = yaml.safe_load("entries: [tp1:64, tp2:128]\nhome: tp1")
    assert StrategyPool.from_config(config).home_index == 0
    assert StrategyPool.from_config(config, home="tp2").home_index == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"entries": ["tp1:64"], "house": "tp1"}, "unknown key 'house'"),
        ([{"strategy": "tp1", "bound": 64}], "entry 1: bound_tokens"),
        ([{"strategy": "tp1", "bound_tokens": "64"}], "entry 1: bound_tokens"),
        (["tp1:64", 3], "entry 2"),
        (7, "neither text, list nor mapping"),
        ([], "has no entry"),
    ],
)
def test_yaml_errors(config, said):
    with pytest.raises(ValueError) as error:
        StrategyPool.from_config(config)
    assert said in message(error)


@pytest.mark.parametrize(
    ("spec", "home", "said"),
    [
        ("", None, "has no entry"),
        ("tp1:64 xp2:128", None, "entry at character 8: strategy 'xp2': 'xp2' at character 1"),
        ("tp1:64 tp2", None, "entry at character 8: 'tp2' lacks a length bound"),
        ("tp1:sixty", None, "bound 'sixty' of 'tp1' is not a number of tokens"),
        ("tp1:-1", None, "bound '-1'"),
        ("tp1:0", None, "bound of tp1 is 0"),
        ("tp1:64 tp2:64", None, "bound 64 of tp2 is not above the bound 64"),
        ("tp1:128 tp2:64", None, "bound 64 of tp2 is not above the bound 128"),
        ("tp1:64 tp2:128 tp1:256", None, "strategy tp1 stands twice, with bounds 64 and 256"),
        ("tp2pp2:64 pp2tp2:128", None, "strategy tp2pp2 stands twice"),
        ("tp1:64 tp2:128", "tp4", "home tp4 is not in it; add it or use one of tp1, tp2"),
        ("tp1:64 tp2:128", "zz", "home: strategy 'zz'"),
    ],
)
def test_errors_name_value_and_place(spec, home, said):
    with pytest.raises(ValueError) as error:
        StrategyPool.parse(spec, home=home)
    assert said in message(error)


def test_same_sizes_with_other_recomputation_are_two_strategies():
    assert len(StrategyPool.parse("tp1:64 tp1rc:128 tp2:256 tp2nosp:512")) == 4


def test_check_resolves_every_dp():
    pool = StrategyPool.parse(SPEC, home="tp1").check(world_size=16, model=shape())
    assert [s.dp for s in pool] == [16, 4, 2]
    assert pool.home is pool.entries[0].strategy
    assert pool.home.dp == 16
    assert str(pool) == SPEC
    assert pool.check(world_size=16) == pool


@pytest.mark.parametrize(
    ("spec", "world_size", "changes", "said"),
    [
        ("tp1:64 tp4:128", 6, {}, ["tp4", "world size 6", "for the whole pool use 4 or 8 ranks"]),
        (
            "tp3:64",
            3,
            {"num_attention_heads": 16, "num_query_groups": 16},
            ["tp 3", "16 attention heads", "1, 2, 4, 8, 16"],
        ),
        (
            "tp4:64",
            4,
            {"num_attention_heads": 12, "num_query_groups": 6, "head_dim": 8, "ffn_hidden_size": 96},
            ["tp 4", "6 query groups", "1, 2, 3, 6, 12"],
        ),
        ("tp8:64", 8, {"ffn_hidden_size": 100}, ["tp 8", "100 columns of the MLP", "fit this model: 1, 2, 4"]),
        ("pp2:64", 2, {"num_layers": 5}, ["2 pipeline stages", "5 layers", "pp sizes that fit: 1, 5"]),
        ("tp2:64", 2, {"vocab_size": 50257}, ["tp 2", "vocabulary of 50257", "pad it to 50258"]),
        ("tp1:64 tp2:2048", 2, {"learned_positions": True, "max_positions": 1024}, ["bound 2048", "1024 positions"]),
        ("cp2:64", 2, {}, ["context parallelism (cp2) is not supported yet"]),
    ],
)
def test_check_errors_name_value_and_what_fits(spec, world_size, changes, said):
    with pytest.raises(ValueError) as error:
        StrategyPool.parse(spec).check(world_size=world_size, model=shape(**changes))
    for part in said:
        assert part in message(error)


def test_query_groups_fewer_than_tp_split_only_where_allowed():
    pool, model = StrategyPool.parse("tp4:64"), shape(num_query_groups=2)
    pool.check(world_size=4, model=model)
    with pytest.raises(ValueError) as error:
        pool.check(world_size=4, model=model, split_query_groups=False)
    assert "tp 4 does not divide the 2 query groups (num_query_groups); tp sizes that fit this model: 1, 2" in message(
        error
    )


def test_learned_positions_at_the_bound_fit():
    StrategyPool.parse("tp1:1024").check(world_size=1, model=shape(learned_positions=True, max_positions=1024))


def test_digest_tells_pools_apart_and_nothing_else():
    pool = StrategyPool.parse(SPEC)
    assert pool.digest() == StrategyPool.parse(SPEC.replace(" ", ", ")).digest()
    others = [
        StrategyPool.parse(SPEC, home="tp1"),
        StrategyPool.parse(SPEC.replace("4096", "4095")),
        StrategyPool.parse(SPEC.replace("tp1", "tp1rc")),
        pool.check(world_size=8),
        pool.check(world_size=16),
    ]
    assert len({p.digest() for p in [pool, *others]}) == 6


def test_padded_vocab_size_of_known_models():
    one, two = ParallelStrategy(), ParallelStrategy(tp=2)
    assert padded_vocab_size(50257, 1, [one, two]) == 50258
    assert padded_vocab_size(50257, 1, [one]) == 50257
    assert padded_vocab_size(151936, 1, [two]) == 151936
    assert padded_vocab_size(50257, 128, StrategyPool.parse("tp1:1 tp2:2")) == 50432
    assert padded_vocab_size(250, 1, [two, ParallelStrategy(tp=3)]) == 252
    with pytest.raises(ValueError, match="at least 1"):
        padded_vocab_size(0, 1, [one])


@given(st.integers(1, 3000), st.integers(1, 16), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_padded_vocab_size_is_the_smallest_common_one(vocab_size, divisible_by, sizes):
    padded = padded_vocab_size(vocab_size, divisible_by, [ParallelStrategy(tp=tp) for tp in sizes])

    def fits(size):
        return all(size % (divisible_by * tp) == 0 for tp in sizes)

    assert padded >= vocab_size and fits(padded)
    assert not any(fits(size) for size in range(vocab_size, padded))
