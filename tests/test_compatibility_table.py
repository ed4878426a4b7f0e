"""The table of tested versions: made from records of test runs, and what a start takes for tested."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

from hotspa_plugin.compatibility import TESTED

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def table():
    spec = importlib.util.spec_from_file_location("compatibility_table", ROOT / ".ci" / "compatibility.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(megatron, *, passed=3, failed=0, date="2026-01-01"):
    versions = {"python": "3.12.1", "torch": "2.14.1", "megatron-core": megatron}
    return {"tests": "core", "date": date, "versions": versions, "passed": passed, "failed": failed, "skipped": 0}


def test_a_newer_run_of_the_same_versions_replaces_the_older_one_and_failures_are_left_out(table):
    newer = run_of("0.19.2", passed=4, date="2026-01-02")
    runs = table.merge(
        [run_of("0.19.2"), run_of("0.16.1")], [newer, run_of("0.18.2", failed=1), run_of("0.17.1", passed=0)]
    )
    assert runs == [newer, run_of("0.16.1")]
    assert "| core | 3.12.1 | 2.14.1 | 0.19.2 | – | – | – | 4 | 0 | 2026-01-02 |" in table.render(runs)


def test_the_page_is_made_of_the_records(table):
    assert table.PAGE.read_text() == table.render(json.loads(table.DATA.read_text()))


@pytest.mark.parametrize("package", TESTED)
def test_what_a_start_takes_for_tested_is_in_the_table(table, package):
    versions = [run["versions"].get(package) for run in json.loads(table.DATA.read_text())]
    found = {tuple(map(int, re.match(r"(\d+)\.(\d+)", version).groups())) for version in versions if version}
    assert found == set(TESTED[package].releases)


def test_a_run_is_recorded_with_its_versions_and_counts(tmp_path):
    command = [sys.executable, "-m", "pytest", "--record", str(tmp_path / "new" / "run.json"), "--record-as", "some"]
    command += [f"{__file__}::test_a_newer_run_of_the_same_versions_replaces_the_older_one_and_failures_are_left_out"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    run = json.loads((tmp_path / "new" / "run.json").read_text())
    assert (run["tests"], run["passed"], run["failed"], run["skipped"]) == ("some", 1, 0, 0)
    assert run["versions"]["python"] == "{}.{}.{}".format(*sys.version_info[:3])
