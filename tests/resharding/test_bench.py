"""The planning part of the switch benchmark: its cases, its rows, and that they meet the bounds."""

import pytest

from hotspa_plugin.resharding.bench import plan_rows, read_settings, switch_cases

KEYS = {
    "remote_bytes", "remote_bytes_bound", "cross_node_bytes", "cross_node_bytes_bound", "max_send_bytes",
    "max_send_bytes_bound", "max_receive_bytes", "max_receive_bytes_bound", "max_card_bytes", "max_card_bytes_bound",
    "num_rounds", "peak_extra_bytes", "plan_seconds", "sources", "case", "policy", "num_ranks",
}  # fmt: skip


def test_cases_cover_every_setting_and_every_ordered_pair():
    cases = switch_cases()
    assert len({case.name for case in cases}) == len(cases)
    settings = read_settings()
    assert len(settings.settings) == 9
    for title, strategies in settings.settings.items():
        size = strategies[0].tp * strategies[0].pp * strategies[0].dp
        assert all(s.tp * s.pp * s.dp == size for s in strategies)
        of_setting = [c for c in cases if c.num_ranks == size and c.name.startswith(title.split(" ")[0])]
        pairs = {(c.source, c.destination) for c in of_setting}
        for one in strategies:
            for other in strategies:
                if one is not other:
                    assert ((one.tp, one.pp), (other.tp, other.pp)) in pairs
    assert {c.num_ranks for c in cases} == {8, 16, 32, 128, 512, 4096}
    assert {"llama-7b on 32: tp2 to pp2", "llama-7b on 32: pp4 to tp8"} <= {c.name for c in cases}


@pytest.mark.parametrize("num_ranks", [8, 512])
def test_rows_meet_their_bounds(num_ranks):
    cases = switch_cases(num_ranks)[:6]
    rows = list(plan_rows(cases, ("balanced", "fcfs") if num_ranks == 8 else ("balanced",), ranks_per_card=(8, 1)))
    for row in rows:
        assert KEYS <= set(row)
        if row["policy"] != "balanced":
            continue
        for name in ("remote_bytes", "cross_node_bytes", "max_receive_bytes"):
            assert row[name] == row[f"{name}_bound"], (row["case"], name)
        assert row["max_send_bytes"] <= 1.01 * row["max_send_bytes_bound"]
        assert row["max_card_bytes"] <= 1.05 * row["max_card_bytes_bound"]
        assert row["max_send_bytes_bound"] >= row["max_send_bytes_bound_without_nodes"] * (1 - 1e-6)
        assert row["flush_sharded_bytes"] == row["flush_sharded_bytes_bound"]
        assert row["flush_replicated_bytes"] >= row["flush_replicated_bytes_bound"]


def test_a_memory_budget_shows_in_rounds_and_peak():
    case = switch_cases(8, "llama-7b")[0]
    (free,) = plan_rows([case], ("balanced",), ranks_per_card=(8,))
    (bounded,) = plan_rows([case], ("balanced",), ranks_per_card=(8,), memory_budget_bytes=2**28)
    assert bounded["peak_extra_bytes"] <= 2**28 < free["peak_extra_bytes"]
    assert bounded["num_rounds"] > free["num_rounds"]


def test_unknown_cases_are_refused():
    with pytest.raises(ValueError, match="no case has 7 ranks"):
        switch_cases(7)
