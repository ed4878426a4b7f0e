"""Reading records back: what is refused, what is tolerated."""

import json
import shutil

import pytest

from hotspa_plugin.report import read_run, summarize, summarize_buckets

from . import synthetic


@pytest.fixture
def folder(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "run")


def test_a_whole_run(run):
    assert [s.step for s in run.steps] == list(range(20))
    assert [r.rank for r in run.ranks] == [0, 1, 2, 3]
    assert run.traced_steps == tuple(range(20))
    assert run.comparison is not None and run.notes == ()


def test_a_missing_folder_and_one_without_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no run.*run\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize("line", ["garbage", "[]", '{"step": 7}', '{"step": "x", "loss": 1}'])
def test_a_damaged_line_is_named(folder, line):
    path = folder / "steps.jsonl"
    rows = path.read_text().splitlines()
    rows[6] = line
    path.write_text("\n".join(rows) + "\n")
    with pytest.raises(ValueError, match=r"steps\.jsonl, line 7: damaged") as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_a_misnamed_field_is_named(folder):
    path = folder / "steps.jsonl"
    path.write_text(path.read_text().replace('"grad_norm"', '"grad_nrom"', 1))
    with pytest.raises(ValueError, match=r"line 1: damaged \(grad_nrom"):
        read_run(folder)


def test_an_unfinished_last_line_is_left_out_and_noted(folder):
    path = folder / "steps.jsonl"
    path.write_text(path.read_text()[:-40])
    run = read_run(folder)
    assert [s.step for s in run.steps] == list(range(19))
    assert "unfinished" in run.notes[0]


def test_a_repeated_step_counts_once_as_last_written(folder):
    record, _ = synthetic.make_step(3, synthetic.POOLS[3], synthetic.random.Random(9), sparse=True)
    with open(folder / "steps.jsonl", "a") as file:
        file.write(record.model_copy(update={"loss": 123.0}).model_dump_json(exclude_none=True) + "\n")
    run = read_run(folder)
    assert [s.step for s in run.steps] == list(range(20)) and run.steps[3].loss == 123
    assert "1 steps were run again" in run.notes[0]


def test_a_damaged_or_newer_run_file_is_named(folder):
    path = folder / "run.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "format_version": 99}))
    with pytest.raises(ValueError, match="format 99.*upgrade"):
        read_run(folder)
    path.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        read_run(folder)


def test_a_damaged_comparison_is_named(folder):
    (folder / "comparison.json").write_text('{"runs": [], "num_steps": 1, "num_tokens": 1}')
    with pytest.raises(ValueError, match=r"comparison\.json is damaged.*exactly one"):
        read_run(folder)


def test_summary_leaves_the_first_step_out_and_adds_up(run):
    summary = summarize(run)
    steady = run.steps[1:]
    seconds = sum(s.seconds.total for s in steady)
    assert summary.tokens_per_s == pytest.approx(sum(s.tokens for s in steady) / seconds)
    assert sum(summary.phase_s.values()) == pytest.approx(summary.step_s)
    assert summary.switching_share == pytest.approx(sum(s.seconds.switch + s.seconds.flush for s in steady) / seconds)
    assert sum(summary.compute_s.values()) == pytest.approx(summary.phase_s["compute"])
    assert summary.num_tokens == sum(s.tokens for s in run.steps)
    assert summary.peak_memory_bytes == max(s.peak_memory_bytes for s in run.steps)


def test_bucket_summaries_account_for_every_sequence(run):
    buckets = summarize_buckets(run)
    assert [b.strategy for b in buckets] == ["tp1", "tp2pp2", "tp4pp2"]
    assert sum(b.num_sequences for b in buckets) == sum(s.sequences for s in run.steps)
    assert sum(b.num_tokens for b in buckets) == sum(s.tokens for s in run.steps)
    assert sum(b.token_share for b in buckets) == pytest.approx(1)
    first = buckets[0]
    assert first.tokens_per_compute_s == pytest.approx(
        first.num_tokens / sum(b.compute_s for s in run.steps for b in s.buckets if b.strategy == "tp1")
    )


def test_a_run_without_steps_has_no_figures(tmp_path):
    summary = summarize(read_run(synthetic.write_run(tmp_path / "r", num_steps=0)))
    assert summary.tokens_per_s is None and summary.switching_share is None and summary.peak_memory_bytes is None
