"""Sets up virtual environments for this checkout and runs commands and tests in them.

    python3 .ci/environment.py setup               set up the preferred target
    python3 .ci/environment.py run COMMAND ...      set up, then run a command in it
    python3 .ci/environment.py test [PYTEST ARGS]   set up every target and run the core tests in each
    python3 .ci/environment.py test-slow [ARGS]     run the slow tests in the preferred target, and in the other
                                                    one what "test" ran in the preferred one only

A target is a range of Python versions with the megatron-core that supports them. Each gets a folder
.venv-3.x in the checkout; what is already there and up to date is left alone. Environment: PYTHON
(an interpreter to use for the target that its version belongs to, which is then preferred), CI=true
(a target without interpreter is a failure), and pip's own variables.

Needs Python 3.8 or newer, nothing else.
"""

import glob
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CORE = "not slow and not te"  # as in pyproject.toml
RECORDS = ROOT / "build" / "tests"
FREE_GIB_NEEDED = 8


class Target:
    """Python versions, best first, that share one megatron-core (see pyproject.toml) and one torch."""

    def __init__(self, versions, cpu_torch, megatron):
        self.versions = versions
        self.cpu_torch = cpu_torch
        self.megatron = megatron

    def __str__(self):
        return f"Python {' or '.join(self.versions)} with megatron-core {self.megatron}"


# Best first. Without a GPU these torch releases are the ones that the tests are known to pass with.
TARGETS = [
    Target(versions=["3.12"], cpu_torch="torch==2.14.1", megatron="0.19"),
    Target(versions=["3.11", "3.10"], cpu_torch="torch==2.13.0", megatron="0.16.1"),
]


def say(message):
    print(message, flush=True)


def interpreter_version(path):
    """'3.12' where ``path`` is an interpreter that can make virtual environments, else None."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(path), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


def find_interpreter(version):
    """An interpreter of ``version`` on PATH or among pyenv's, or None."""
    candidates = [shutil.which("python" + version), shutil.which("python3"), shutil.which("python")]
    for root in (os.environ.get("PYENV_ROOT"), os.path.expanduser("~/.pyenv")):
        if root:
            candidates += sorted(
                glob.glob(os.path.join(root, "versions", version + ".*", "bin", "python")), reverse=True
            )
    for candidate in candidates:
        if candidate and interpreter_version(candidate) == version:
            return candidate
    return None


def chosen_interpreter():
    """(target, version, path) of the interpreter that PYTHON names, or None where it is not set."""
    wanted = os.environ.get("PYTHON")
    if not wanted:
        return None
    path = shutil.which(wanted)
    version = path and interpreter_version(path)
    for target in TARGETS:
        if version in target.versions:
            return target, version, path
    supported = ", ".join(v for target in TARGETS for v in target.versions)
    what = f"is Python {version}" if version else "is no interpreter that can make virtual environments"
    sys.exit(f"PYTHON={wanted} {what}; supported are Python {supported}")


def find_targets():
    """All (target, version, path), the preferred first; version and path are None where none was found."""
    chosen = chosen_interpreter()
    found = [chosen] if chosen else []
    for target in TARGETS:
        if chosen and target is chosen[0]:
            continue
        paths = ((version, find_interpreter(version)) for version in target.versions)
        version, path = next(((v, p) for v, p in paths if p), (None, None))
        found.append((target, version, path))
    return found


def preferred():
    for target, version, path in find_targets():
        if path:
            return target, version, path
    sys.exit("no supported Python found; install Python 3.12 (or 3.11, 3.10), or name one with PYTHON=/path/to/python")


def has_gpu():
    try:
        done = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and b"GPU" in done.stdout


def run_step(venv, what, command):
    """Runs one set-up step quietly, with a sign of life; on failure shows the end of its output and exits."""
    log = venv.parent / (venv.name + ".log")
    say(f"[{venv.name}] {what}")
    start = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=str(ROOT))
        while True:
            try:
                code = process.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                say(f"[{venv.name}]   ... {time.monotonic() - start:.0f} s")
    if code:
        tail = log.read_text(errors="replace").splitlines()[-25:]
        say("\n".join("    " + line for line in tail))
        sys.exit(f"[{venv.name}] failed (exit code {code}): {' '.join(command)}\nThe whole output is in {log}")
    log.unlink()


def digest_of(inputs):
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def set_up(target, version, path):
    """Makes the target's environment current; returns the folder of its programs."""
    venv = ROOT / (".venv-" + version)
    programs = venv / "bin"
    torch = "torch>=2.6" if has_gpu() else target.cpu_torch
    inputs = [str(ROOT), os.path.realpath(path)]
    python_stamp, stamp = venv / "hotspa-python", venv / "hotspa-setup"
    python_digest = digest_of(inputs)
    digest = digest_of(inputs + [torch, (ROOT / "pyproject.toml").read_text(), (ROOT / "setup.py").read_text()])
    if stamp.exists() and stamp.read_text() == digest:
        return programs
    free_gib = shutil.disk_usage(str(ROOT)).free / 2**30
    if not venv.exists() and free_gib < FREE_GIB_NEEDED:
        sys.exit(
            f"[{venv.name}] needs about {FREE_GIB_NEEDED} GiB of disk space, but {ROOT} has {free_gib:.1f} GiB free"
        )
    if stamp.exists():
        stamp.unlink()
    if not (python_stamp.exists() and python_stamp.read_text() == python_digest):
        run_step(venv, f"making a virtual environment with {path}", [path, "-m", "venv", "--clear", str(venv)])
        python_stamp.write_text(python_digest)
    pip = [str(programs / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    run_step(venv, f"installing {torch} (several minutes the first time)", pip + [torch])
    run_step(
        venv,
        "installing hotspa-plugin, megatron-core and test tools",
        pip + [torch, "--editable", ".[megatron,deepspeed,test]"],
    )
    stamp.write_text(digest)
    say(f"[{venv.name}] ready; use it with: . {venv.name}/bin/activate")
    return programs


def run_in(programs, command):
    """Runs a command with the environment's programs first on PATH; returns its exit code."""
    environment = dict(os.environ, PATH=f"{programs}{os.pathsep}{os.environ.get('PATH', '')}")
    environment["VIRTUAL_ENV"] = str(programs.parent)
    # Several ranks share the cores; one thread each is fastest, and gives the same sums everywhere.
    environment.setdefault("OMP_NUM_THREADS", "1")
    try:
        # Looked up here: the child's PATH does not count when the program itself is searched.
        program = shutil.which(command[0], path=environment["PATH"]) or command[0]
        return subprocess.call([program] + command[1:], cwd=str(ROOT), env=environment)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


def recording(name, version):
    """Arguments with which pytest leaves a record of a whole run for compatibility.py."""
    # With a blank between, pytest would take a record of an earlier run for a test file.
    return [f"--record={RECORDS / f'{version}-{name}.json'}", f"--record-as={name}"]


def pytest(target, version, path, arguments, record):
    """Runs pytest in one target; returns (passed, line for the summary).

    ``record`` names the run in the table of tested versions, where all of it runs.
    """
    programs = set_up(target, version, path)
    say(f"== Python {version} with megatron-core {target.megatron}")
    code = run_in(programs, ["python", "-m", "pytest"] + arguments + (recording(record, version) if record else []))
    what = {0: "passed", 5: "FAILED: no test ran", 130: "interrupted"}.get(code, f"FAILED (pytest exit code {code})")
    return code == 0, f"Python {version} with megatron-core {target.megatron}: {what}"


def test(arguments):
    """Runs the core tests under every target that has an interpreter; those marked newest under the best one only."""
    in_ci = os.environ.get("CI", "").lower() == "true"
    lines, good, ran = [], True, False
    for target, version, path in find_targets():
        if path is None:
            lines.append(f"{target}: NOT RUN, no such interpreter on PATH or in pyenv")
            good = good and not in_ci
            continue
        selection = [] if not ran else ["-m", CORE + " and not newest"]
        passed, line = pytest(target, version, path, selection + arguments, record=None if arguments else "core")
        lines.append(line)
        good, ran = good and passed, True
    say("== " + "\n== ".join(lines))
    if not ran:
        sys.exit(
            "no supported Python found; install Python 3.12 (or 3.11, 3.10), or name one with PYTHON=/path/to/python"
        )
    return 0 if good else 1


def test_slow(arguments):
    """Runs the slow tests under the preferred target, and what ``test`` left out under the others."""
    lines, good = [], True
    for target, version, path in find_targets():
        if path is not None:
            name, selection = ("newest", CORE + " and newest") if lines else ("slow", "slow")
            passed, line = pytest(
                target, version, path, ["-m", selection] + arguments, record=None if arguments else name
            )
            lines.append(line)
            good = good and passed
    say("== " + "\n== ".join(lines or ["no supported Python found"]))
    return 0 if good and lines else 1


def main():
    commands = {"setup", "run", "test", "test-slow"}
    if len(sys.argv) < 2 or sys.argv[1] not in commands or (sys.argv[1] == "run" and len(sys.argv) < 3):
        sys.exit(__doc__.strip())
    command, arguments = sys.argv[1], sys.argv[2:]
    if command == "test":
        return test(arguments)
    if command == "test-slow":
        return test_slow(arguments)
    programs = set_up(*preferred())
    if command == "setup":
        say(f"Ready: {programs}")
        return 0
    return run_in(programs, arguments)


if __name__ == "__main__":
    sys.exit(main())
