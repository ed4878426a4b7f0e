"""What the terminal shows."""

import io

import pytest
from rich.console import Console

from hotspa_plugin.report import TrainingProgress, print_comparison, print_run
from hotspa_plugin.report import format as formats
from hotspa_plugin.runtime.run_record import BucketRecord

from . import synthetic


def make_console(terminal=False, width=80):
    return Console(
        file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, force_interactive=terminal
    )


def shown(console):
    return console.file.getvalue()


def test_the_bucket_table_fits_80_columns_uncut(run):
    console = make_console()
    print_run(run, console)
    text = shown(console)
    assert "…" not in text
    table = [line for line in text.splitlines() if line.startswith(("strategy", "tp"))]
    assert len(table) == 4 and all(len(line) <= 80 for line in table)
    assert "peak memory 4." in text


def test_the_comparison_says_reasons_and_the_verdict():
    console = make_console()
    print_comparison(synthetic.make_comparison(), console)
    text = shown(console)
    assert "…" not in text and "static tp4pp2" in text
    assert "static tp1: cannot hold its longest sequence" in text and "Hot switching wins" in text


def test_names_are_not_taken_for_markup(run):
    console = make_console(width=120)
    step = run.steps[0]
    bucket = BucketRecord(bound_tokens=4, strategy="[red]x[/]", sequences=1, tokens=1)
    print_run(synthetic_replace(run, (step.model_copy(update={"buckets": (bucket,)}),)), console)
    assert "[red]x[/]" in shown(console)


def synthetic_replace(run, steps):
    import dataclasses

    return dataclasses.replace(run, steps=steps)


def test_progress_off_a_terminal_prints_few_lines_and_the_last(run):
    console = make_console()
    with TrainingProgress(20, console=console, interval_s=1e9) as progress:
        for step in run.steps:
            progress.update(step)
    lines = shown(console).splitlines()
    assert len(lines) == 2 and "step 1/20" in lines[0] and "step 20/20" in lines[1] and "tokens/s, loss" in lines[1]


def test_progress_on_a_terminal_is_a_bar_that_counts_on_after_a_resume(run):
    console = make_console(terminal=True, width=100)
    with TrainingProgress(30, first_step=10, description="[b]", console=console) as progress:
        for step in run.steps:
            progress.update(step)
    assert "30/30" in shown(console) and "[b]" in shown(console) and "tokens/s" in shown(console)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (3.5 * 2**30, "3.50 GiB"),
        (None, "–"),
    ],
)
def test_bytes(value, text):
    assert formats.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1.934, "1.93 s"),
        (0.99996, "1.00 s"),
        (0.412, "412 ms"),
        (85e-6, "85.0 µs"),
        (1e-9, "0.00 µs"),
        (200, "3 min 20 s"),
        (119.6, "2 min 0 s"),
        (7260, "2 h 1 min"),
        (None, "–"),
    ],
)
def test_seconds(value, text):
    assert formats.format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (7.25, "7.25"),
        (9876, "9,876"),
        (9999.6, "10,000"),
        (12345, "12.3k"),
        (999_999, "1.00M"),
        (1.25e6, "1.25M"),
        (float("inf"), "inf"),
        (None, "–"),
    ],
)
def test_counts(value, text):
    assert formats.format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 %"), (0.0001, "<0.1 %"), (0.051, "5.1 %"), (0.0996, "10 %"), (1, "100 %"), (None, "–")]
)
def test_shares(value, text):
    assert formats.format_share(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (3.61149, "3.611"), (3e-4, "3.00e-04"), (float("nan"), "NaN"), (float("inf"), "infinite"), (None, "–")],
)
def test_values(value, text):
    assert formats.format_value(value) == text
