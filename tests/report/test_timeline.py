"""Timelines: which step, which ranks, what lies where."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from hotspa_plugin.report import read_run, timeline_svg, write_timeline_svg
from hotspa_plugin.report.reader import Run
from hotspa_plugin.report.timeline import build_timeline, typical_step
from hotspa_plugin.report.timeline_svg import page_timeline
from hotspa_plugin.runtime.run_record import ModelInfo, PoolEntry, RunInfo
from hotspa_plugin.runtime.trace import RankSpans, Span

from . import synthetic


def make_run(tmp_path, spans_of_rank):
    info = RunInfo(
        world_size=len(spans_of_rank),
        home="tp2",
        model=ModelInfo(name="m"),
        pool=(PoolEntry(strategy="tp1", bound_tokens=8), PoolEntry(strategy="tp2", bound_tokens=16)),
    )
    ranks = tuple(RankSpans(rank=i, host="h", steps={0: tuple(spans)}) for i, spans in enumerate(spans_of_rank))
    return Run(directory=tmp_path, info=info, ranks=ranks)


def test_blocks_lie_where_their_spans_were(tmp_path):
    run = make_run(
        tmp_path,
        [
            [Span(name="compute", start_ns=100, end_ns=150, args={"bucket": 16, "step": 0})],
            [
                Span(name="compute", start_ns=150, end_ns=200, args={"strategy": "tp1"}),
                Span(name="flush", start_ns=100, end_ns=125, hidden=True),
            ],
        ],
    )
    timeline = build_timeline(run, 0)
    assert timeline.seconds == pytest.approx(100e-9)
    (first,), (second, hidden) = (blocks for _, blocks in timeline.rows)
    assert (first.start, first.width, first.css, first.label) == (0, 0.5, "b1", "tp2")
    assert (second.start, second.width, second.css) == (0.5, 0.5, "b0")
    assert (hidden.start, hidden.width, hidden.css, hidden.hidden) == (0, 0.25, "flush", True)


def test_inner_phases_are_painted_last_and_details_left_to_the_trace(tmp_path):
    run = make_run(
        tmp_path,
        [
            [
                Span(name="data", start_ns=10, end_ns=20, depth=2),
                Span(name="forward", start_ns=20, end_ns=30, depth=2),
                Span(name="compute", start_ns=0, end_ns=50, depth=1),
                Span(name="bucket", start_ns=0, end_ns=60),
                Span(name="save", start_ns=60, end_ns=90),
            ]
        ],
    )
    blocks = build_timeline(run, 0).rows[0][1]
    assert [b.css for b in blocks] == ["other", "compute", "data"]
    assert blocks[0].label == "save"


def test_bytes_and_other_arguments_are_told(tmp_path):
    span = Span(
        name="switch", start_ns=0, end_ns=2_000_000, args={"strategy": "tp1", "bytes_remote": 3 * 2**20, "round": 2}
    )
    title = build_timeline(make_run(tmp_path, [[span]]), 0).rows[0][1][0].title
    assert title == "rank 0: switch tp1 · 2.00 ms, from 0 s · remote 3.00 MiB · round 2"


def test_many_small_blocks_become_few(tmp_path):
    spans = [Span(name="compute", start_ns=i * 10, end_ns=i * 10 + 9) for i in range(3000)]
    blocks = build_timeline(make_run(tmp_path, [spans]), 0).rows[0][1]
    assert len(blocks) == 1 and blocks[0].start + blocks[0].width == pytest.approx(1)
    assert blocks[0].title.endswith("and more")


def test_a_step_without_spans_is_refused_by_name(run):
    with pytest.raises(ValueError, match="no spans of step 999.*0, 1, 2"):
        build_timeline(run, 999)


def test_the_typical_step_runs_most_buckets_and_is_not_the_first(run):
    step = typical_step(run)
    most = max(len(record.buckets) for record in run.steps[1:])
    assert step != 0 and len(run.steps[step].buckets) == most
    assert typical_step(dataclasses.replace(run, ranks=())) is None


def test_ranks_are_spread_evenly_and_keep_both_ends(tmp_path):
    run = make_run(tmp_path, [[Span(name="compute", start_ns=0, end_ns=1)]] * 100)
    timeline = build_timeline(run, 0, max_ranks=16)
    shown = [rank for rank, _ in timeline.rows]
    assert len(set(shown)) == 16 and shown[0] == 0 and shown[-1] == 99 and timeline.num_ranks == 100
    assert page_timeline(timeline).count('class="lane"') == 16


def test_the_picture_is_whole_svg_that_stands_alone(run, tmp_path):
    root = ET.parse(write_timeline_svg(run, tmp_path / "timeline.svg")).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and root.get("viewBox") == f"0 0 960 {root.get('height')}"
    text = " ".join(root.itertext())
    for word in ("rank 0", "rank 3", "tp1 ≤ 4,096", "switch", "flush", "optimizer"):
        assert word in text
    width = 960
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(rect.get("x", 0)) <= width and float(rect.get("width")) <= width


def test_a_run_without_a_trace_has_no_picture(tmp_path):
    run = read_run(synthetic.write_run(tmp_path / "r", num_steps=2, sparse=True))
    with pytest.raises(ValueError, match="without a trace"):
        timeline_svg(run)
