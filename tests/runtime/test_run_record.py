"""Run records: what is written, what is refused, what a crash leaves."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from hotspa_plugin.runtime.recorder import NullRecorder, RunRecorder, check_run_directory
from hotspa_plugin.runtime.run_record import (
    BucketRecord,
    ComparedRun,
    Comparison,
    LengthHistogram,
    ModelInfo,
    PoolEntry,
    RunInfo,
    StepRecord,
    StepSeconds,
    installed_versions,
)
from hotspa_plugin.runtime.trace import TraceSampling, merge_trace, open_for_append, part_path, read_spans


def make_info(world_size=2):
    return RunInfo(
        world_size=world_size,
        pool=(PoolEntry(strategy="tp1", bound_tokens=64), PoolEntry(strategy="tp2", bound_tokens=256)),
        home="tp2",
        model=ModelInfo(name="tiny-llama"),
    )


def make_step(step, **changes):
    fields = dict(
        step=step,
        loss=5.0,
        tokens=100,
        target_tokens=90,
        sequences=10,
        tokens_per_s=50.0,
        seconds=StepSeconds(total=2.0, compute=1.5),
        buckets=(BucketRecord(bound_tokens=64, strategy="tp1", sequences=10, tokens=100),),
    )
    return StepRecord(**{**fields, **changes})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_step_on_rank_0_and_spans_of_all_ranks_in_one_trace(tmp_path):
    recorders = [RunRecorder(tmp_path / "run", r, 2, info=make_info() if r == 0 else None) for r in range(2)]
    for step in range(3):
        for recorder in recorders:
            with recorder.span("switch", bucket=0) as span:
                span.args["bytes_remote"] = 7
            with recorder.span("compute", bucket=0):
                pass
            recorder.finish_step(make_step(step) if recorder.rank == 0 else step)
    for recorder in reversed(recorders):
        recorder.close()

    assert [row["step"] for row in lines(tmp_path / "run" / "steps.jsonl")] == [0, 1, 2]
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(complete) == 2 * 3 * 2
    assert {e["pid"] for e in complete} == {0, 1}
    assert min(e["ts"] for e in complete) == 0
    assert complete[0]["args"] == {"step": 0, "bucket": 0, "bytes_remote": 7}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert [name.split(" (")[0] for name in names] == ["rank 0", "rank 1"]


def test_a_step_is_readable_before_the_run_ends(tmp_path):
    recorder = RunRecorder(tmp_path, 0, 1, info=make_info(1))
    with recorder.span("compute"):
        pass
    recorder.finish_step(make_step(0))
    assert len(lines(tmp_path / "steps.jsonl")) == 1
    assert list(read_spans(tmp_path)[0].steps) == [0]


def test_ranks_of_one_machine_line_up_whatever_their_wall_clocks_say(tmp_path):
    for rank, wall_ns in ((0, 1_000_000_000), (1, 9_000_000_000)):
        part = part_path(tmp_path, rank)
        part.parent.mkdir(exist_ok=True)
        clock = {"rank": rank, "host": "a", "machine": "m", "pid": 1, "wall_ns": wall_ns, "monotonic_ns": 0}
        step = {"step": 0, "spans": [["compute", 10, 20, 0, 0, {}]]}
        part.write_text(json.dumps(clock) + "\n" + json.dumps(step) + "\n")
    first, second = (r.steps[0][0] for r in read_spans(tmp_path))
    assert first.start_ns == second.start_ns == 1_000_000_010


def test_ranks_of_two_machines_line_up_by_their_wall_clocks(tmp_path):
    for rank, monotonic_ns in ((0, 0), (1, 500)):
        part = part_path(tmp_path, rank)
        part.parent.mkdir(exist_ok=True)
        clock = {"rank": rank, "host": "a", "machine": f"m{rank}", "wall_ns": 1000, "monotonic_ns": monotonic_ns}
        step = {"step": 0, "spans": [["compute", 10 + monotonic_ns, 20 + monotonic_ns, 0, 0, {}]]}
        part.write_text(json.dumps(clock) + "\n" + json.dumps(step) + "\n")
    first, second = (r.steps[0][0] for r in read_spans(tmp_path))
    assert first.start_ns == second.start_ns == 1010


def test_a_folder_with_another_run_is_refused_and_left_as_it_is(tmp_path):
    with RunRecorder(tmp_path, 0, 1, info=make_info(1)) as recorder:
        recorder.finish_step(make_step(0))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"holds another run.*--out.*resume"):
        RunRecorder(tmp_path, 0, 1, info=make_info(1))
    with pytest.raises(ValueError, match=str(tmp_path)):
        check_run_directory(tmp_path)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert check_run_directory(tmp_path, resume=True) == tmp_path


def test_an_output_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        RunRecorder(tmp_path / "out", 0, 1, info=make_info(1))
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_with_other_files_is_used_and_they_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunRecorder(check_run_directory(tmp_path), 0, 1, info=make_info(1)).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_resume_appends_drops_a_half_written_line_and_keeps_the_history(tmp_path):
    recorder = RunRecorder(tmp_path, 0, 1, info=make_info(1))
    for step in range(2):
        with recorder.span("compute"):
            pass
        recorder.finish_step(make_step(step))
    with open(tmp_path / "steps.jsonl", "a") as file:
        file.write('{"step": 2, "lo')  # killed while writing
    with open(part_path(tmp_path, 0), "a") as file:
        file.write('{"step": 2, "sp')
    assert list(read_spans(tmp_path)[0].steps) == [0, 1]

    with RunRecorder(tmp_path, 0, 1, info=make_info(1), resume=True, first_step=1) as recorder:
        for step in (1, 2):
            with recorder.span("switch"):
                pass
            recorder.finish_step(make_step(step, loss=4.0))
    assert [(row["step"], row["loss"]) for row in lines(tmp_path / "steps.jsonl")] == [(0, 5), (1, 5), (1, 4), (2, 4)]
    spans = read_spans(tmp_path)[0].steps
    assert {step: [s.name for s in spans[step]] for step in spans} == {0: ["compute"], 1: ["switch"], 2: ["switch"]}
    info = RunInfo.model_validate_json((tmp_path / "run.json").read_text())
    assert len(info.sessions) == 1 and info.sessions[0].pool == make_info().pool


@pytest.mark.parametrize("text", ["", "whole\n", "half", "whole\nhalf", "whole\n" + "x" * 200_000], ids=len)
def test_only_an_unfinished_last_line_is_removed(tmp_path, text):
    path = tmp_path / "lines"
    path.write_text(text)
    with open_for_append(path) as file:
        file.write("more\n")
    assert path.read_text() == ("whole\n" if text.startswith("whole") else "") + "more\n"


def test_a_span_may_carry_any_value(tmp_path):
    with RunRecorder(tmp_path, 0, 1, info=make_info(1)) as recorder:
        with recorder.span("compute", loss=math.nan, path=tmp_path, name_of_rank="a"):
            pass
        recorder.finish_step(make_step(0))
    text = (tmp_path / "trace.json").read_text()
    trace = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert trace["traceEvents"][-1]["args"]["loss"] == "nan"


def test_what_a_crash_interrupted_is_kept(tmp_path):
    with pytest.raises(RuntimeError), RunRecorder(tmp_path, 0, 1, info=make_info(1), first_step=7) as recorder:
        with recorder.span("switch"):
            raise RuntimeError("peer is gone")
    assert [s.name for s in read_spans(tmp_path)[0].steps[7]] == ["switch"]


def test_a_damaged_line_is_named(tmp_path):
    with RunRecorder(tmp_path, 0, 1, info=make_info(1)) as recorder:
        with recorder.span("compute"):
            pass
        recorder.finish_step(make_step(0))
    path = part_path(tmp_path, 0)
    path.write_text(path.read_text() + "garbage\n")
    with pytest.raises(ValueError, match=r"rank00000.jsonl, line 3"):
        merge_trace(tmp_path)


def test_spans_are_sampled_and_bounded(tmp_path):
    sampling = TraceSampling(first=2, every=10, limit=4, max_spans_per_step=3)
    with RunRecorder(tmp_path, 0, 1, info=make_info(1), sampling=sampling) as recorder:
        for step in range(100):
            for _ in range(5):
                with recorder.span("compute"):
                    pass
            recorder.finish_step(make_step(step))
    spans = read_spans(tmp_path)[0].steps
    assert list(spans) == [0, 1, 10, 20]
    assert all(len(s) == 3 for s in spans.values())
    assert lines(part_path(tmp_path, 0))[1]["num_dropped"] == 2
    assert len(lines(tmp_path / "steps.jsonl")) == 100


def test_exposed_seconds_count_each_moment_once(tmp_path):
    recorder = RunRecorder(tmp_path, 0, 1, info=make_info(1))
    with recorder.span("bucket"):  # no phase: only groups
        with recorder.span("compute"):
            time.sleep(0.02)
            with recorder.span("data"):
                time.sleep(0.03)
        with recorder.span("flush"):
            time.sleep(0.01)
    now = time.perf_counter_ns()
    recorder.add_hidden("switch", now - 5_000_000, now)
    seconds = recorder.seconds()
    assert seconds.data >= 0.03 and seconds.flush >= 0.01 and seconds.compute >= 0.02
    parts = seconds.compute + seconds.data + seconds.flush
    assert parts <= seconds.total and seconds.switch == 0
    assert math.isclose(parts + seconds.other, seconds.total, abs_tol=1e-9)
    assert recorder.hidden_s() == {"switch": pytest.approx(0.005)}
    recorder.finish_step(make_step(0))
    assert recorder.seconds().compute == 0 and recorder.hidden_s() == {}
    recorder.close()


def test_the_device_is_waited_for_at_both_ends_of_a_span(tmp_path):
    calls = []
    recorder = RunRecorder(tmp_path, 1, 2, synchronize=lambda: calls.append("sync"))
    with recorder.span("compute"):
        calls.append("work")
    assert calls == ["sync", "work", "sync"]


def test_the_null_recorder_writes_nothing_and_answers_everything(tmp_path):
    with NullRecorder() as recorder:
        with recorder.span("switch", bucket=1) as span, recorder.span("compute"):
            span.args["bytes"] = 3
        assert span.seconds == 0 and span.args == {}
        recorder.add_hidden("flush", 0, 1)
        recorder.start_step()
        recorder.finish_step(make_step(0))
        assert recorder.seconds().total == 0 and recorder.hidden_s() == {} and not recorder.enabled
    public = {name for name in dir(RunRecorder) if not name.startswith("_")}
    assert public <= {name for name in dir(NullRecorder) if not name.startswith("_")}


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_recorded_as_standard_json(loss):
    text = make_step(0, loss=loss).model_dump_json()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    again = StepRecord.model_validate_json(text).loss
    assert again == loss or (math.isnan(again) and math.isnan(loss))


def test_a_misspelt_or_negative_field_is_refused():
    with pytest.raises(ValidationError):
        make_step(0, grad_nrom=1.0)
    with pytest.raises(ValidationError):
        make_step(-1)


@given(st.lists(st.integers(1, 1 << 20), max_size=50), st.integers(1, 8))
def test_histogram_counts_every_length_inside_its_bin(lengths, bins_per_octave):
    histogram = LengthHistogram.from_lengths(lengths, bins_per_octave)
    assert sum(histogram.counts) == len(lengths)
    for low, high, count in zip(histogram.edges_tokens[:-1], histogram.edges_tokens[1:], histogram.counts, strict=True):
        assert count == sum(low < length <= high for length in lengths)


def test_histogram_refuses_lengths_that_no_sequence_has():
    with pytest.raises(ValueError, match="0 tokens"):
        LengthHistogram.from_lengths([3, 0])


def test_a_comparison_holds_one_hot_run():
    with pytest.raises(ValidationError, match="exactly one"):
        Comparison(runs=(ComparedRun(label="tp2", kind="static"),), num_steps=1, num_tokens=1)


def test_versions_leave_out_what_is_not_installed():
    assert set(installed_versions(["pydantic", "no-such-package-here"])) == {"python", "pydantic"}
