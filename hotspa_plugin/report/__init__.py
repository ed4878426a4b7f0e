"""Pages, pictures and tables made from run records alone."""

from hotspa_plugin.report.comparison import StaticResult, compare, verdict
from hotspa_plugin.report.console import (
    TrainingProgress,
    bucket_table,
    comparison_table,
    print_comparison,
    print_run,
)
from hotspa_plugin.report.page import render, write_report
from hotspa_plugin.report.reader import Run, read_run
from hotspa_plugin.report.summary import BucketSummary, RunSummary, summarize, summarize_buckets
from hotspa_plugin.report.timeline_svg import timeline_svg, write_timeline_svg

__all__ = [
    "BucketSummary",
    "Run",
    "RunSummary",
    "StaticResult",
    "TrainingProgress",
    "bucket_table",
    "compare",
    "comparison_table",
    "print_comparison",
    "print_run",
    "read_run",
    "render",
    "summarize",
    "summarize_buckets",
    "timeline_svg",
    "verdict",
    "write_report",
    "write_timeline_svg",
]
