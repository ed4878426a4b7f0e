import pytest

from hotspa_plugin.report import read_run

from . import synthetic


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run of 20 steps on 4 ranks with a comparison; tests read it only."""
    return synthetic.write_run(tmp_path_factory.mktemp("runs") / "run", comparison=synthetic.make_comparison())


@pytest.fixture(scope="session")
def run(run_folder):
    return read_run(run_folder)
