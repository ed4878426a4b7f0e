"""The set-up script behind the Makefile: which interpreters it takes, and when it fails."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / ".ci" / "environment.py"


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """The script as a module that sees no real interpreter and installs nothing."""
    spec = importlib.util.spec_from_file_location("environment", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("PYTHON", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    return module


def with_interpreters(environment, monkeypatch, *versions, exit_codes=None):
    """Only ``versions`` exist; pytest ends with ``exit_codes[version]``, 0 by default. Returns the runs."""
    runs = []
    monkeypatch.setattr(environment, "find_interpreter", lambda v: f"/python{v}" if v in versions else None)
    monkeypatch.setattr(environment, "set_up", lambda target, version, path: version)

    def run_in(version, command):
        runs.append((version, command))
        return (exit_codes or {}).get(version, 0)

    monkeypatch.setattr(environment, "run_in", run_in)
    return runs


def test_core_tests_run_under_both_targets(environment, monkeypatch, capsys):
    runs = with_interpreters(environment, monkeypatch, "3.12", "3.11", "3.10")
    assert environment.test(["-k", "switch"]) == 0
    command = ["python", "-m", "pytest", "-k", "switch"]  # a part of the tests is not recorded
    core = ["python", "-m", "pytest", "-m", "not slow and not te and not newest", "-k", "switch"]
    assert runs == [("3.12", command), ("3.11", core)]
    assert "Python 3.12 with megatron-core 0.19: passed" in capsys.readouterr().out


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
@pytest.mark.parametrize(("there", "missing"), [("3.10", "Python 3.12"), ("3.12", "Python 3.11 or 3.10")])
def test_missing_interpreter_is_named_and_fails_in_ci_only(environment, monkeypatch, capsys, ci, code, there, missing):
    monkeypatch.setenv("CI", ci)
    runs = with_interpreters(environment, monkeypatch, there)
    assert environment.test([]) == code
    assert [version for version, _ in runs] == [there]
    assert f"{missing} with megatron-core" in capsys.readouterr().out


def test_no_interpreter_at_all_fails(environment, monkeypatch):
    with_interpreters(environment, monkeypatch)
    with pytest.raises(SystemExit, match="install Python 3.12"):
        environment.test([])
    with pytest.raises(SystemExit, match="install Python 3.12"):
        environment.preferred()


@pytest.mark.parametrize(("exit_code", "said"), [(1, "pytest exit code 1"), (5, "no test ran")])
def test_one_failing_target_fails_the_whole(environment, monkeypatch, capsys, exit_code, said):
    runs = with_interpreters(environment, monkeypatch, "3.12", "3.11", exit_codes={"3.12": exit_code})
    assert environment.test([]) == 1
    assert len(runs) == 2, "the other target runs all the same"
    assert said in capsys.readouterr().out


def test_preference(environment, monkeypatch):
    with_interpreters(environment, monkeypatch, "3.10", "3.11")
    assert environment.preferred()[1:] == ("3.11", "/python3.11")


def test_named_interpreter_is_taken_for_its_target(environment, monkeypatch):
    with_interpreters(environment, monkeypatch, "3.12", "3.11")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setattr(environment, "interpreter_version", lambda path: "3.10")
    assert [found[1] for found in environment.find_targets()] == ["3.10", "3.12"]
    monkeypatch.setattr(environment, "interpreter_version", lambda path: "3.9")
    with pytest.raises(SystemExit, match=r"is Python 3.9; supported are Python 3.12, 3.11, 3.10"):
        environment.find_targets()
    monkeypatch.setenv("PYTHON", "no-such-python")
    with pytest.raises(SystemExit, match="PYTHON=no-such-python is no interpreter"):
        environment.find_targets()


def test_set_up_runs_once_and_again_when_its_inputs_change(environment, monkeypatch, tmp_path):
    (tmp_path / "pyproject.toml").write_text("one")
    (tmp_path / "setup.py").write_text("")
    steps = []

    def run_step(venv, what, command):
        venv.mkdir(exist_ok=True)
        steps.append(what.split()[0])

    monkeypatch.setattr(environment, "run_step", run_step)
    target = environment.TARGETS[0]
    environment.set_up(target, "3.12", sys.executable)
    assert steps == ["making", "installing", "installing"]
    environment.set_up(target, "3.12", sys.executable)
    assert len(steps) == 3
    (tmp_path / "pyproject.toml").write_text("two")
    environment.set_up(target, "3.12", sys.executable)
    assert steps[3:] == ["installing", "installing"]


def test_failing_step_shows_its_output(environment, tmp_path, capsys):
    command = [sys.executable, "-c", "print('the cause'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="exit code 3"):
        environment.run_step(tmp_path / ".venv-x", "installing", command)
    assert "the cause" in capsys.readouterr().out


def test_interpreter_version_runs_the_interpreter(environment):
    assert environment.interpreter_version(sys.executable) == "{}.{}".format(*sys.version_info[:2])
    assert environment.interpreter_version("/no/such/python") is None


def test_unknown_command_explains_itself():
    done = subprocess.run([sys.executable, str(SCRIPT), "fly"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "environment.py setup" in done.stderr


def test_no_test_is_started_after_the_minutes_are_over():
    command = [sys.executable, "-m", "pytest", "--minutes", "0", f"{__file__}::test_preference"]
    done = subprocess.run(command, cwd=SCRIPT.parent.parent, capture_output=True, text=True, timeout=120)
    assert "1 skipped" in done.stdout and "passed" not in done.stdout
