"""The result of ``hotspa verify``: its bounds, its table and its JSON file.

Keys: ``max_relative_gradient_error`` (over tensors: norm of the difference over norm), ``worst_tensor``,
``tensor_parallel_copies_identical``, ``max_relative_loss_error``, ``parameters_bit_identical``, ``sequences_in``,
``sequences_trained``, ``target_tokens``, ``num_process_groups_after_start``, ``num_process_groups_at_end``; in bf16
also ``whole_gradient_error`` and ``static_whole_gradient_error``, both against fp32.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FP32_BOUND = 1e-5
BF16_FACTOR = 2.0
REQUIRED_KEYS = (
    "max_relative_gradient_error",
    "worst_tensor",
    "tensor_parallel_copies_identical",
    "max_relative_loss_error",
    "parameters_bit_identical",
    "sequences_in",
    "sequences_trained",
    "target_tokens",
    "num_process_groups_after_start",
    "num_process_groups_at_end",
)
BF16_KEYS = ("whole_gradient_error", "static_whole_gradient_error")
FORMAT = "hotspa verify"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One thing verified. ``bound`` is how it should be, in words or as a number."""

    name: str
    value: str
    bound: str
    passed: bool


def judge(result: Mapping[str, Any], dtype: str) -> list[Check]:
    """What ``result`` says, check by check. A value that is no number is never within a bound."""
    wanted = REQUIRED_KEYS + (BF16_KEYS if dtype == "bf16" else ())
    missing = [key for key in wanted if key not in result]
    assert not missing, f"verify's result lacks {missing}"
    worst = result["worst_tensor"]
    checks = []
    if dtype == "fp32":
        gradient_error = result["max_relative_gradient_error"]
        checks += [
            _at_most(f"gradient error, worst in {worst}", gradient_error, FP32_BOUND),
            _at_most("loss error", result["max_relative_loss_error"], FP32_BOUND),
        ]
    else:
        bound = BF16_FACTOR * result["static_whole_gradient_error"]
        name = f"whole gradient's error against fp32, worst tensor {worst}"
        checks.append(_at_most(name, result["whole_gradient_error"], bound))
    checks += [
        _is_true("tensor-parallel copies identical", result["tensor_parallel_copies_identical"]),
        _is_true("parameters bit-identical after all switches", result["parameters_bit_identical"]),
        _equal("sequences trained", result["sequences_trained"], result["sequences_in"]),
        _equal(
            "process groups at the end", result["num_process_groups_at_end"], result["num_process_groups_after_start"]
        ),
    ]
    return checks


def _at_most(name: str, value: float, bound: float) -> Check:
    return Check(name=name, value=f"{value:.2e}", bound=f"at most {bound:.2e}", passed=bool(value <= bound))


def _is_true(name: str, value: bool) -> Check:
    return Check(name=name, value="yes" if value else "no", bound="yes", passed=bool(value))


def _equal(name: str, value: int, wanted: int) -> Check:
    return Check(name=name, value=str(value), bound=str(wanted), passed=value == wanted)


def print_checks(checks: Sequence[Check], result: Mapping[str, Any], seconds: float) -> None:
    """A table on stdout, and the checks that failed on stderr."""
    import click
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("", "measured", "wanted", ""):
        table.add_column(heading, overflow="fold")
    for check in checks:
        table.add_row(check.name, check.value, check.bound, "[green]ok[/]" if check.passed else "[bold red]BEYOND[/]")
    Console(highlight=False).print(table)
    failed = [check for check in checks if not check.passed]
    click.echo(
        f"{result['target_tokens']} target tokens, {seconds:.0f} s: "
        + ("beyond bounds" if failed else "all within bounds")
    )
    for check in failed:
        click.echo(f"beyond bounds: {check.name}: {check.value} (wanted {check.bound})", err=True)


def check_json_path(path: Path, *, force: bool) -> None:
    """Raises ValueError, before anything runs, where the result cannot or should not be written to ``path``."""
    if not path.parent.is_dir():
        raise ValueError(f"--json {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"--json {path}: is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--json {path}: cannot be written; choose another place")
    if path.exists() and not force and not _is_result(path):
        raise ValueError(
            f"--json {path}: holds something else than a result of hotspa verify; choose another name or add --force"
        )


def _is_result(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8") or "null")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def write_json(path: Path, result: Mapping[str, Any], checks: Sequence[Check], settings: Mapping[str, Any]) -> None:
    """Writes the result whole or not at all. Numbers that are not finite become text, which JSON allows."""
    content = {
        "format": FORMAT,
        **{key: _as_json(value) for key, value in result.items()},
        "within_bounds": all(check.passed for check in checks),
        "beyond_bounds": [check.name for check in checks if not check.passed],
        "settings": dict(settings),
    }
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
