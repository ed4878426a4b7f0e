"""hotspa plan, simulate and profile: what they print, write and refuse."""

import json

import pytest

from hotspa_plugin.cli.main import run
from hotspa_plugin.cost import published_profile
from hotspa_plugin.cost.fitting import measured_lengths

PLAN = ["plan", "--model", "llama-13b", "--gpus", "8", "--global-batch", "64", "--context", "16384"]


@pytest.fixture(autouse=True)
def in_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_plan_is_printed_and_written(capsys, tmp_path):
    assert run([*PLAN, "--json", "plan.json"]) == 0
    shown = capsys.readouterr().out
    assert "static tp8rc:16384" in shown or "static tp4" in shown
    assert "memory of a rank in GB" in shown
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["format"] == "hotspa plan"
    assert plan["advises"] in ("hot", "static")
    chosen = plan["chosen"]
    assert plan["settings"]["num_ranks"] == 8
    for memory in chosen["memory_bytes"].values():
        assert memory["total_bytes"] <= plan["settings"]["memory_limit_bytes"]
    parts = dict(chosen["step_s"])
    assert parts.pop("total_s") == pytest.approx(sum(parts.values()))
    assert [s["step_s"]["total_s"] for s in plan["statics"]] == sorted(s["step_s"]["total_s"] for s in plan["statics"])


def test_uniform_lengths_stay_static(capsys):
    assert run([*PLAN, "--lengths", "uniform:2048-2048"]) == 0
    assert "stay static: " in capsys.readouterr().out.splitlines()[-1]


def error(arguments, capsys):
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_a_profile_of_another_model_is_refused(capsys, tmp_path):
    (tmp_path / "profile.json").write_text(published_profile("llama-7b").to_json())
    said = error([*PLAN, "--profile", "profile.json"], capsys)
    assert "profile of llama-7b is of another model: its num_layers is 32, that of llama-13b is 40" in said


def test_a_model_without_figures_is_told_to_measure(capsys):
    said = error(["plan", "--model", "tiny-llama", "--gpus", "4"], capsys)
    assert "tiny-llama has no published figures; measure some with hotspa profile" in said
    assert "is neither a file nor a known model" in error(["plan", "--model", "nothing", "--gpus", "4"], capsys)


def test_an_impossible_memory_limit_names_the_nearest_possible(capsys):
    said = error([*PLAN, "--memory-limit", "8"], capsys)
    assert "memory limit of 8.00 GB a rank: no strategy fits" in said and "the least for sequences of" in said


def test_lengths_over_every_strategy_are_refused(capsys):
    said = error(
        ["plan", "--model", "llama-13b", "--gpus", "8", "--lengths", "uniform:900000-900000", "--no-recompute"], capsys
    )
    assert "sequences of 900000 tokens are more than any strategy can hold" in said and "the most is" in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"bins": []}', "the histogram is empty"),
        ('{"bins": [{"over_tokens": 0, "up_to_tokens": 64, "percent_of_sequences": 0}]}', "the histogram is empty"),
        ('{"bins": [{"over_tokens": 64, "up_to_tokens": 64, "percent_of_sequences": 1}]}', "ends at 64, not above"),
        ('{"bins": [{"over_tokens": 64}]}', "bins.0.percent_of_sequences: Field required"),
        ("{", "cannot be read as a histogram"),
    ],
)
def test_useless_histograms_are_refused(capsys, tmp_path, content, reason):
    (tmp_path / "lengths.json").write_text(content)
    said = error([*PLAN, "--lengths", "lengths.json"], capsys)
    assert "lengths.json" in said and reason in said


def test_lengths_may_come_from_a_file_or_a_histogram(capsys, tmp_path):
    (tmp_path / "lengths.txt").write_text("100\n200\n3000\n16000\n")
    assert run([*PLAN, "--lengths", "lengths.txt", "--no-recompute"]) == 0
    bins = [
        {"over_tokens": 0, "up_to_tokens": 512, "percent_of_sequences": 99},
        {"over_tokens": 8192, "percent_of_sequences": 1},
    ]
    (tmp_path / "histogram.json").write_text(json.dumps({"bins": bins}))
    assert run([*PLAN, "--lengths", "histogram.json", "--no-recompute"]) == 0
    capsys.readouterr()
    assert "no such file" in error([*PLAN, "--lengths", "missing.txt"], capsys)


def test_a_missing_folder_is_refused_before_anything_runs(capsys):
    assert "there is no folder nowhere" in error([*PLAN, "--json", "nowhere/plan.json"], capsys)


def test_a_simulation_compares_with_the_papers_pools(capsys, tmp_path):
    arguments = ["simulate", "--setting", "llama-13b:8", "--context", "16384", "--global-batch", "64"]
    assert run([*arguments, "--json", "simulation.json"]) == 0
    shown = capsys.readouterr().out
    assert "where hot switching pays" in shown and "best static" in shown
    (result,) = json.loads((tmp_path / "simulation.json").read_text())["results"]
    assert result["gain"] >= 1
    assert {p["setting"] for p in result["paper"]} == {"llama-13b on 8"}
    for paper in result["paper"]:
        assert (paper["prediction"] is None) == bool(paper["misfit"])


def test_unknown_settings_are_refused(capsys):
    assert "models are llama-7b, llama-13b, llama-32b" in error(["simulate", "--setting", "gpt:8"], capsys)


@pytest.mark.parametrize("longest", [256, 512, 2048, 4096, 10000])
def test_fits_are_tried_on_lengths_that_they_did_not_see(longest):
    fitted, unseen = measured_lengths(longest)
    assert longest in fitted and len(fitted) >= 3 and unseen
    assert not set(fitted) & set(unseen)
    assert min(fitted) < min(unseen) and max(unseen) < max(fitted)
