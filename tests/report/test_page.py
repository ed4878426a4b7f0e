"""The page: whole, self-contained, and harmless whatever the data says."""

import html.parser
import json
import math
import re

import pytest

from hotspa_plugin.report import read_run, render, write_report
from hotspa_plugin.report.histogram_svg import length_chart
from hotspa_plugin.report.svg import Series, line_chart, linear_ticks, log_ticks, smooth, tag, thin
from hotspa_plugin.runtime.run_record import LengthHistogram, PoolEntry, RunInfo, StepRecord, write_json

from . import synthetic

VOID = {"meta", "input", "br", "link", "img"}


class Page(html.parser.HTMLParser):
    """Checks that every element is closed and collects what a test asks about."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (tag, self.open[-3:])
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def section(page_text, heading):
    return page_text.split(f"<h2>{heading}", 1)[1].split("</section>", 1)[0]


def test_the_page_of_a_whole_run(run, run_folder):
    path = write_report(run_folder)
    assert path == run_folder / "report.html" and (run_folder / "trace.json").exists()
    text = path.read_text()
    page = Page(text)
    for heading in (
        "Hot switching against static",
        "Timeline of one step",
        "Where a step",
        "Sequence lengths",
        "Buckets",
        "Bytes moved per switch",
        "Loss",
        "Throughput",
        "Memory of the fullest rank",
        "Gradient norm",
    ):
        assert f"<h2>{heading}" in text, heading
    for word in (
        "tiny-llama on 4 ranks",
        "torch 2.14.1",
        "tp2pp2 up to 16,384 tokens",
        "Hot switching wins",
        "cannot hold its longest sequence",
    ):
        assert word in page.words, word
    assert text.count("<template data-step=") == 19  # the twentieth is shown


def test_the_page_loads_nothing(run):
    text = render(run)
    page = Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    for name, attributes in page.attributes:
        assert not {"src", "href", "xlink:href", "action"} & set(attributes), name
        assert not [key for key in attributes if key.startswith("on")], name
    assert (
        "url(" not in text
        and "@import" not in text
        and "://" not in re.sub(r"chrome://tracing", "", text).replace("http://www.w3.org/2000/svg", "")
    )
    assert "default-src 'none'" in text


HOSTILE = "<script>alert(1)</script>\"' onload=x & ]]></style>"


def test_every_name_from_the_data_is_escaped(tmp_path):
    folder = synthetic.write_run(tmp_path / "r", num_steps=3)
    text = (folder / "run.json").read_text()
    info = RunInfo.model_validate_json(text)
    evil = json.loads(text)
    evil["model"]["name"] = evil["command"] = evil["data"]["source"] = evil["machine"]["host"] = HOSTILE
    evil["versions"] = {HOSTILE: HOSTILE}
    evil["started_at"] = evil["pool"][0]["strategy"] = HOSTILE
    (folder / "run.json").write_text(json.dumps(evil))
    named = json.dumps(HOSTILE)[1:-1]
    for path in [folder / "steps.jsonl", *(folder / "trace").iterdir()]:
        path.write_text(path.read_text().replace(info.pool[0].strategy + '"', named + '"').replace("node-", named))
    comparison = synthetic.make_comparison()
    runs = tuple(
        r if r.kind == "hot" else r.model_copy(update={"label": HOSTILE, "error": HOSTILE}) for r in comparison.runs
    )
    write_json(folder / "comparison.json", comparison.model_copy(update={"runs": runs}))

    page_text = render(read_run(folder))
    assert "<script>alert" not in page_text and "</style>" in page_text
    page = Page(page_text)
    assert page.tags.count("script") == 1 and page.tags.count("style") == 1
    assert not [a for _, a in page.attributes if any(name.startswith("on") for name in a)]


@pytest.mark.parametrize(
    "options",
    [
        dict(num_steps=0),
        dict(num_steps=1),
        dict(num_steps=3, sparse=True),
        dict(num_steps=2, num_buckets=2, sparse=True),
    ],
    ids=str,
)
def test_short_and_sparse_runs_have_a_page(tmp_path, options):
    text = render(read_run(synthetic.write_run(tmp_path / "r", **options)))
    page = Page(text)
    assert "None" not in page.words and "nan" not in page.words.lower().split()
    assert ("No step has finished yet" in page.words) == (options["num_steps"] == 0)


def test_a_long_run_on_many_ranks_stays_a_page_one_can_open(tmp_path):
    folder = synthetic.write_run(tmp_path / "r", num_steps=400, num_ranks=64, num_buckets=5)
    text = render(read_run(folder))
    Page(text)
    assert len(text) < 6e6
    assert text.count("data-step=") < 27  # of 27 traced steps, only as many as fit
    many = synthetic.write_run(tmp_path / "m", num_steps=2, num_ranks=130)
    assert "64 of 130 ranks" in Page(render(read_run(many))).words


def test_a_diverged_run_has_a_page(tmp_path):
    folder = synthetic.write_run(tmp_path / "r", num_steps=6)
    rows = [StepRecord.model_validate_json(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    rows[3:] = [row.model_copy(update={"loss": math.nan, "grad_norm": math.inf}) for row in rows[3:]]
    (folder / "steps.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    text = render(read_run(folder))
    page = Page(text)
    assert text.count("✕") >= 6 and "Loss NaN" in page.words
    for name, attributes in page.attributes:
        places = [attributes.get(key) or "" for key in ("d", "x", "y", "cx", "cy", "width")]
        assert not any("nan" in place for place in places), name


def test_an_output_in_no_folder_is_refused(run_folder, tmp_path):
    with pytest.raises(ValueError, match="no folder .*deep"):
        write_report(run_folder, tmp_path / "deep" / "page.html")
    assert write_report(run_folder, tmp_path / "page.html").stat().st_size > 10_000


def test_shares_of_the_mean_step_add_up(run):
    shares = [float(s) for s in re.findall(r"width:([\d.]+)%", section(render(run), "Where a step"))]
    assert sum(shares) == pytest.approx(100, abs=0.1)


def test_histogram_bars_hold_every_sequence_and_a_cut_length_lies_within_its_bound():
    pool = (PoolEntry(strategy="tp1", bound_tokens=4096), PoolEntry(strategy="tp2", bound_tokens=8192))
    chart = length_chart(LengthHistogram.from_lengths([100] * 3 + [4096] * 4 + [8192] * 5), pool)
    ups = re.findall(r'class="bar (b\d)"><title>[^:]*: (\d+) sequences', chart)
    assert ups == [("b0", "3"), ("b0", "4"), ("b1", "5")]
    assert "No sequence length" in length_chart(LengthHistogram.from_lengths([]), pool)


def test_ticks_cover_the_values():
    for low, high in ((0, 1), (3.5, 5.5), (0, 93_000), (-2, 2), (5, 5), (0, 0), (1e-9, 3e-9)):
        ticks = linear_ticks(low, high)
        assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 9
    for low, high in ((1, 10), (0.02, 3000), (5, 5), (1e-12, 1e12)):
        ticks = log_ticks(low, high)
        assert ticks[0] <= low * 1.001 and ticks[-1] >= high * 0.999 and len(ticks) <= 9


def test_thinning_keeps_the_extremes_and_smoothing_the_mean():
    points = [(i, float(i % 7)) for i in range(10_000)]
    points[5_000] = (5_000, 99.0)
    kept = thin(points, 500)
    assert len(kept) <= 500 and (5_000, 99.0) in kept and kept == sorted(kept)
    assert [y for _, y in smooth([(i, 2.0) for i in range(50)], 9)] == pytest.approx([2.0] * 50)
    assert smooth([(i, float(i)) for i in range(50)], 9)[0] == (0, 0.0)


def test_a_chart_of_nothing_finite_says_so():
    assert "No finite value" in line_chart([Series(name="a", points=[(0, math.nan)])], title="t", format_y=str)


def test_an_element_escapes_attributes_and_text():
    assert tag("text", '<b>"', aria_label='"><x') == '<text aria-label="&#34;&gt;&lt;x">&lt;b&gt;&#34;</text>'


def test_charts_carry_their_points_for_the_pointer(run):
    plots = [attributes for _, attributes in Page(render(run)).attributes if "data-series" in attributes]
    assert len(plots) == 5
    (series,) = json.loads(plots[0]["data-series"])
    assert [point[2:] for point in series["at"]] == [[s.step, f"{s.loss:.4g}"] for s in run.steps]
