"""Skips tests that need a GPU where there is none, and starts no further test once ``--minutes`` are over."""

import time

import pytest

_STARTED = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption(
        "--minutes",
        type=float,
        metavar="M",
        help="start no further test after so many minutes; what was not started is reported as skipped",
    )


def pytest_configure(config):
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
