"""Options of a test run: ``--minutes`` ends it early, ``--record`` leaves what ran; tests that need a GPU skip."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import signal
import time

import pytest

_STARTED = pytest.StashKey[float]()
_PACKAGES = ("torch", "megatron-core", "deepspeed", "transformers", "transformer-engine")


def pytest_addoption(parser):
    parser.addoption(
        "--minutes",
        type=float,
        metavar="M",
        help="start no further test after so many minutes; what was not started is reported as skipped",
    )
    parser.addoption(
        "--record",
        type=pathlib.Path,
        metavar="FILE",
        help="write versions and counts of this run to FILE, as JSON",
    )
    parser.addoption(
        "--record-as", default="", metavar="NAME", help="what the recorded run is called; default: what ran"
    )


def pytest_configure(config):
    # Background jobs of a shell ignore Ctrl-C, and so would everything that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_STARTED] = time.monotonic()


def pytest_runtest_setup(item):
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - item.config.stash[_STARTED] > 60 * minutes:
        pytest.skip(f"not started: the {minutes:g} minutes of --minutes are over")


def pytest_collection_modifyitems(items):
    needing = [item for item in items if item.get_closest_marker("cuda")]
    if needing:
        import torch

        if not torch.cuda.is_available():
            for item in needing:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--record")
    if path is None:
        return
    counts = {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed", "error", "skipped")}
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    run = {
        "tests": config.getoption("--record-as") or " ".join(config.invocation_params.args),
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "passed": counts["passed"],
        "failed": counts["failed"] + counts["error"],
        "skipped": counts["skipped"],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run))
