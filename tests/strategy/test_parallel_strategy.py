import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspa_plugin.strategy import ParallelStrategy, refuse_unsupported

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def parallel_strategies(draw):
    tp, pp = draw(SIZES), draw(SIZES)
    return ParallelStrategy(
        tp=tp,
        sp=draw(st.booleans()) if tp > 1 else None,
        pp=pp,
        cp=draw(SIZES),
        ep=draw(SIZES),
        vpp=draw(SIZES) if pp > 1 else 1,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )


@given(parallel_strategies())
def test_text_round_trips(strategy):
    assert ParallelStrategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("spec", "fields", "written"),
    [
        ("tp1", {}, "tp1"),
        ("dp4", {"dp": 4}, "tp1"),
        ("tp4pp2", {"tp": 4, "pp": 2}, "tp4pp2"),
        ("pp2tp4", {"tp": 4, "pp": 2}, "tp4pp2"),
        ("tp1pp2", {"pp": 2}, "pp2"),
        ("tp2nosp", {"tp": 2, "sp": False}, "tp2nosp"),
        ("tp1rc", {"recompute": "full"}, "tp1rc"),
        ("tp2pp4nosprcs", {"tp": 2, "pp": 4, "sp": False, "recompute": "selective"}, "tp2pp4nosprcs"),
        ("tp2pp2vpp3cp2ep4", {"tp": 2, "pp": 2, "vpp": 3, "cp": 2, "ep": 4}, "tp2pp2vpp3cp2ep4"),
    ],
)
def test_parse(spec, fields, written):
    strategy = ParallelStrategy.parse(spec)
    assert strategy == ParallelStrategy(**fields)
    assert str(strategy) == written


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("", "empty"),
        ("tp", "'tp' at character 1"),
        ("tp2xx3", "'xx3' at character 4"),
        ("tp2 pp2", "' pp2' at character 4"),
        ("tp2tp4", "'tp4' at character 4 sets tp a second time"),
        ("tp2rcrcs", "sets recompute a second time"),
        ("tp0", "tp is 0"),
        ("pp2dp0", "dp is 0"),
        ("nosp", "nosp needs tp > 1"),
        ("tp1vpp2", "needs pp > 1"),
        ("TP2", "'TP2' at character 1"),
    ],
)
def test_parse_errors_name_the_place(spec, said):
    with pytest.raises(ValueError) as error:
        ParallelStrategy.parse(spec)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_sequence_parallel_is_on_with_tensor_parallel_unless_said_otherwise():
    assert not ParallelStrategy(tp=1).sp
    assert ParallelStrategy(tp=2).sp
    assert not ParallelStrategy(tp=2, sp=False).sp
    with pytest.raises(ValueError, match="needs tp > 1"):
        ParallelStrategy(tp=1, sp=True)


def test_recompute_must_be_known():
    with pytest.raises(ValueError, match="'most' is not one of none, selective, full"):
        ParallelStrategy(recompute="most")


@given(parallel_strategies(), st.integers(1, 64))
def test_resolve_uses_every_rank_or_refuses(strategy, world_size):
    replica = strategy.tp * strategy.pp * strategy.cp
    stage = world_size // strategy.pp
    if world_size % replica or stage % strategy.ep:
        with pytest.raises(ValueError):
            strategy.resolve(world_size)
    else:
        resolved = strategy.resolve(world_size)
        assert resolved.dp * replica == world_size
        assert resolved.resolve(world_size) == resolved
        assert str(resolved) == str(strategy)


def test_resolve_names_what_fits():
    with pytest.raises(ValueError) as error:
        ParallelStrategy.parse("tp4").resolve(6)
    assert "use 4 or 8 ranks" in str(error.value)
    assert "1, 2, 3 or 6" in str(error.value)
    with pytest.raises(ValueError, match="use 8 ranks"):
        ParallelStrategy.parse("tp4pp2").resolve(6)
    with pytest.raises(ValueError, match="write dp4"):
        ParallelStrategy.parse("tp2dp2").resolve(8)
    assert ParallelStrategy.parse("tp2dp4").resolve(8).dp == 4
    with pytest.raises(ValueError, match="world size is 0"):
        ParallelStrategy().resolve(0)


@pytest.mark.parametrize("spec", ["cp2", "ep2", "pp2vpp2"])
def test_unsupported_axes_are_refused_by_name(spec):
    with pytest.raises(ValueError, match="not supported yet"):
        refuse_unsupported(ParallelStrategy.parse(spec))


def test_supported_strategy_is_not_refused():
    refuse_unsupported(ParallelStrategy.parse("tp4pp2nosprc"))
