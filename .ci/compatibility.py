"""Makes the table of tested versions out of what test runs recorded.

    python3 .ci/compatibility.py [FOLDER]

Reads FOLDER/*.json (default: build/tests, where make test, make test-slow and make test-te leave them, and
pytest --record=FILE wherever it is told to), enters complete runs without a failure into docs/compatibility.json
and writes docs/compatibility.md from that.

Needs Python 3.8 or newer, nothing else.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA, PAGE = ROOT / "docs" / "compatibility.json", ROOT / "docs" / "compatibility.md"
PACKAGES = ["python", "torch", "megatron-core", "deepspeed", "transformers", "transformer-engine"]
HEAD = """# Tested versions

Every line is a run of the tests that ended without a failure, the last one for its versions. *core* is `make test`,
*slow* `make test-all`, *te* `make test-te`; other names say which files ran. Skipped tests need a GPU, a package that
the line does not have, or more minutes than the run was given. A start with other versions warns, and refuses those
known not to work; `hotspa doctor` says the same beforehand.

"""


def key(run):
    return [run["tests"], *(run["versions"].get(package) for package in PACKAGES)]


def merge(old, new):
    """Runs of both, of those with the same tests and versions the newer one."""
    runs = {json.dumps(key(run)): run for run in [*old, *new] if not run["failed"] and run["passed"]}
    return sorted(runs.values(), key=lambda run: (run["versions"]["megatron-core"], run["tests"]), reverse=True)


def render(runs):
    columns = ["tests", *PACKAGES, "passed", "skipped", "date"]
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join(["---"] * len(columns)) + " |"]
    for run in runs:
        versions = [run["versions"].get(package) or "–" for package in PACKAGES]
        cells = [run["tests"], *versions, str(run["passed"]), str(run["skipped"]), run["date"]]
        lines.append("| " + " | ".join(cells) + " |")
    return HEAD + "\n".join(lines) + "\n"


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "tests"
    new = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not new:
        sys.exit(f"no test run is recorded in {folder}: run make test first")
    for run in new:
        if run["failed"] or not run["passed"]:
            print(f"left out, because {run['failed']} tests failed: {run['tests']} {run['versions']}")
    runs = merge(json.loads(DATA.read_text()) if DATA.exists() else [], new)
    DATA.write_text(json.dumps(runs, indent=1) + "\n")
    PAGE.write_text(render(runs))
    print(f"wrote {DATA} and {PAGE}")


if __name__ == "__main__":
    main()
