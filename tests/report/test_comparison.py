"""Who wins is said plainly, ties and losses included."""

import math

import pytest

from hotspa_plugin.report import compare, verdict
from hotspa_plugin.runtime.run_record import ComparedRun, Comparison

from . import synthetic


def two(hot, static, **options):
    return Comparison(
        runs=(ComparedRun(label="hot", kind="hot", **hot), ComparedRun(label="tp2", kind="static", **static)),
        num_steps=10,
        num_tokens=1000,
        **options,
    )


@pytest.mark.parametrize(
    ("factor", "outcome", "words"),
    [
        (1.3, "hot", "Hot switching wins: 1."),
        (0.8, "static", "Static tp4pp2 wins: hot switching reaches 0."),
        (1.001, "tie", "A tie"),
    ],
)
def test_the_verdict_against_the_best_static_run(factor, outcome, words):
    comparison = synthetic.make_comparison(factor, noise=0.02)
    best = compare(comparison)[0]
    assert best.outcome == outcome and verdict(comparison).startswith(words)
    assert best.ratio == pytest.approx(factor, rel=0.02) and 0 < best.spread < 0.03


def test_a_difference_inside_the_noise_is_a_tie_and_the_same_without_noise_is_not():
    assert compare(synthetic.make_comparison(1.05, noise=0.25))[0].outcome == "tie"
    assert compare(synthetic.make_comparison(1.05, noise=0.001))[0].outcome == "hot"


def test_without_steps_only_a_clear_difference_counts():
    assert compare(two({"tokens_per_s": 102.0}, {"tokens_per_s": 100.0}))[0].outcome == "tie"
    assert compare(two({"tokens_per_s": 110.0}, {"tokens_per_s": 100.0}))[0].outcome == "hot"


def test_losses_that_do_not_agree_are_said():
    same = two({"tokens_per_s": 2.0, "losses": (5.0, 4.0)}, {"tokens_per_s": 1.0, "losses": (5.0, 4.0)})
    assert "The losses agree" in verdict(same)
    early = two({"tokens_per_s": 2.0, "losses": (5.0, 4.0)}, {"tokens_per_s": 1.0, "losses": (5.1, 4.0)})
    assert "do not agree: tp2 differs by 2.0e-02" in verdict(early)
    broken = two({"tokens_per_s": 2.0, "losses": (math.nan, 4.0)}, {"tokens_per_s": 1.0, "losses": (5.0, 4.0)})
    assert "do not agree" in verdict(broken)


def test_missing_figures_are_said():
    nothing = two({"tokens_per_s": 2.0}, {"error": "does not fit"})
    assert compare(nothing)[0].outcome == "none" and "No static strategy has figures" in verdict(nothing)
    assert "did not run" in verdict(two({}, {"tokens_per_s": 1.0}))


def test_runs_are_listed_fastest_first_and_those_without_figures_last():
    assert [r.run.label for r in compare(synthetic.make_comparison())] == ["tp4pp2", "tp2pp2", "tp1"]
