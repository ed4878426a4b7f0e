"""Drawing, judging and shrinking cases, and switches by loopback. Whole steps are in test_steps."""

import dataclasses

import pytest

from hotspa_plugin.cli.main import run
from hotspa_plugin.fuzz import outcome, switches
from hotspa_plugin.fuzz.campaign import Campaign, draw_cases
from hotspa_plugin.fuzz.case import FuzzCase, check_at_start, misfit
from hotspa_plugin.fuzz.outcome import Status
from hotspa_plugin.fuzz.runners import SwitchRunner
from hotspa_plugin.fuzz.shrink import shrink

MODEL = {
    "num_layers": 4, "hidden_size": 6, "num_attention_heads": 2, "num_query_groups": 1, "head_dim": 2,
    "ffn_hidden_size": 14, "vocab_size": 249, "make_vocab_size_divisible_by": 1, "positions": "rope", "norm": "rmsnorm",
    "activation": "gelu", "linear_bias": False, "qk_layernorm": False, "tied_embeddings": False,
}  # fmt: skip


def case(**changes):
    model = {**MODEL, **changes.pop("model", {})}
    settings = {"kind": "switch", "num_ranks": 4, "pool": ("pp4rc:36", "tp2pp2:91"), "home": "pp4rc"}
    return FuzzCase(**{**settings, **changes}, model=model)


def test_a_campaign_is_the_same_every_time_and_reads_back():
    first, second = (draw_cases(40, 7, (2, 8), ("switch", "step")) for _ in range(2))
    assert first == second != draw_cases(40, 8, (2, 8), ("switch", "step"))
    assert [FuzzCase.model_validate_json(one.model_dump_json()) for one in first] == first
    steps = [one for one in first if one.kind == "step"]
    assert len(steps) == 40 // 9 and all(2 <= one.num_ranks <= 8 for one in steps if misfit(one) is None)


def test_starting_agrees_with_plain_arithmetic():
    """What the start refuses is what does not fit, over many cases of both sorts."""
    cases = [*draw_cases(300, 3, (2, 8), ("switch",)), *draw_cases(300, 4, (2, 8), ("step",))]
    refused = 0
    for one in cases:
        why = misfit(one)
        if why is not None and why.startswith("length"):
            continue  # the pool and the model fit; the batch is refused where it is laid out
        if why is None:
            check_at_start(one)
        else:
            refused += 1
            with pytest.raises(ValueError):
                check_at_start(one)
    assert 20 < refused < 150


def test_switches_by_loopback():
    """A short campaign; ``hotspa fuzz --kind switches --cases 500`` is the long one."""
    campaign = Campaign(cases=draw_cases(15, 11, (2, 3), ("switch",)), timeout_s=1, shrink_s=0)
    campaign.run()
    assert not campaign.failures, [failure.outcome for failure in campaign.failures]
    assert sum(one.status is Status.VERIFIED for one in campaign.outcomes) >= 8


# Found by fuzzing, and kept.
FOUND = {
    "a round took 8 bytes over its budget": case(
        model={"head_dim": 1, "positions": "learned"}, switch_memory_bytes=3000
    ),
    "rotary positions with an odd head_dim": case(model={"head_dim": 1}),
    "rows of queries, keys and values that tp does not divide": case(
        num_ranks=8, pool=("tp1:36", "tp8:91"), home="tp1",
        model={"num_attention_heads": 8, "head_dim": 2, "num_layers": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("one", FOUND.values(), ids=FOUND)
def test_what_fuzzing_found(one):
    found = SwitchRunner().run(one)
    assert not found.is_defect, found


def test_a_mistake_is_found_made_small_and_replayed(monkeypatch, capsys):
    """A switch that leaves a piece out wherever tp is 2."""
    original = switches.build_switch_plan

    def leaves_out(home, there, **options):
        plan = original(home, there, **options)
        if not there.label.startswith("tp2"):
            return plan
        routes = plan.routes
        return dataclasses.replace(plan, routes=routes.select(routes.start != routes.start.max()))

    monkeypatch.setattr(switches, "build_switch_plan", leaves_out)
    pool, model = ("pp2:36", "tp1:40", "tp2:91"), {"num_layers": 2, "linear_bias": True}
    big = case(pool=pool, home="pp2", dtype="bf16", ranks_per_node=2, model=model)
    assert run(["fuzz", "--replay", big.model_dump_json(), "--shrink", "20"]) == 1
    told = capsys.readouterr()
    assert "1 of 1 cases FAILED" in told.out
    command = next(line for line in told.err.splitlines() if "replay with" in line)
    small = FuzzCase.model_validate_json(command[command.index("{") : command.rindex("}") + 1])
    assert SwitchRunner().run(small).status is Status.WRONG
    assert len(small.pool) == 2 and small.dtype == "fp32" and small.ranks_per_node is None
    assert small.num_ranks == 2 and not small.model["linear_bias"]
    monkeypatch.undo()
    assert SwitchRunner().run(small).status is Status.VERIFIED


def test_shrinking_keeps_what_the_failure_needs():
    big = case(kind="step", lengths=((3, 90, 17, 8), (64, 1)), model={"linear_bias": True})

    def fails(one):
        return one.model["linear_bias"] and any(length > 60 for step in one.lengths for length in step)

    small = shrink(big, fails)
    assert small.lengths == ((61,),) and small.model["linear_bias"] and small.num_ranks == 1


def test_verdicts():
    fits, misfits = case(), case(home="tp16")
    assert outcome.verified(fits).status is Status.VERIFIED
    assert outcome.verified(misfits).status is Status.TOO_LAX
    assert outcome.refused(misfits, "pool: home tp16 is not in it; use one of pp4rc").status is Status.REFUSED
    assert outcome.refused(fits, "pool: no").status is Status.TOO_STRICT
    for unclear in ("", "Traceback (most recent call last)", "one\ntwo"):
        assert outcome.refused(misfits, unclear).status is Status.UNCLEAR
    tight = case(switch_memory_bytes=10)
    assert outcome.refused(tight, "a switch memory budget of 10 bytes cannot hold one row").status is Status.REFUSED
    assert outcome.refused(tight, "something else").status is Status.TOO_STRICT


def test_bad_input(capsys):
    assert run(["fuzz", "--ranks", "8..2"]) == 2
    assert run(["fuzz", "--replay", "{"]) == 2
    assert run(["fuzz", "--replay", '{"kind": "switch"}']) == 2
    assert run(["fuzz", "--json", "/nowhere/result.json"]) == 2
    assert capsys.readouterr().err.count("error:") == 4
