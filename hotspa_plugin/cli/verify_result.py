"""The result of ``hotspa verify``: its table and its JSON file. What is beyond bounds, ``verify_case`` has decided."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotspa_plugin.cli import planning_options

FORMAT = "hotspa verify"


def rows(result: Mapping[str, Any], dtype: str) -> list[tuple[str, str, str]]:
    """What was verified, what was measured, and what was wanted."""
    from hotspa_plugin.integrations.megatron.verify import BF16_FACTOR, FP32_BOUND

    tensor_error = result["max_relative_gradient_error"]
    worst = ("  found in", str(result["worst_tensor"]), "")
    if dtype == "fp32":
        gradient = [("largest gradient error of a tensor", f"{tensor_error:.2e}", f"at most {FP32_BOUND:.0e}"), worst]
    else:
        error, bound = result["whole_gradient_error"], BF16_FACTOR * result["static_whole_gradient_error"]
        wanted = f"at most {bound:.2e}, {BF16_FACTOR:g} x home's static run"
        gradient = [
            ("whole gradient's error against fp32", f"{error:.2e}", wanted),
            ("largest gradient error of a tensor", f"{tensor_error:.2e}", ""),
            worst,
        ]
    num_groups = result["num_process_groups_after_start"]
    return [
        *gradient,
        ("largest loss error", f"{result['max_relative_loss_error']:.2e}", ""),
        ("tensor-parallel copies identical", _yes(result["tensor_parallel_copies_identical"]), "yes"),
        ("parameters identical after switching", _yes(result["parameters_bit_identical"]), "yes, bit for bit"),
        ("sequences trained", str(result["sequences_trained"]), str(result["sequences_in"])),
        ("target tokens", str(result["target_tokens"]), ""),
        ("process groups at the end", str(result["num_process_groups_at_end"]), f"{num_groups}, as after the start"),
    ]


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def print_result(result: Mapping[str, Any], dtype: str, seconds: float) -> None:
    """A table on stdout, and what is beyond bounds on stderr."""
    import click

    table = [("", "measured", "wanted"), *rows(result, dtype)]
    width = max(len(name) for name, _, _ in table)
    for name, measured, wanted in table:
        click.echo(f"{name:<{width}}  {measured:<10} {wanted}".rstrip())
    verdict = "hot switching does not change the numbers" if result["exact"] else "BEYOND BOUNDS"
    click.echo(f"{verdict} ({seconds:.0f} s)")
    for problem in result["problems"]:
        click.echo(f"beyond bounds: {problem}", err=True)


def check_json_path(path: Path, *, force: bool, format: str = FORMAT) -> None:
    """Raises ValueError, before anything runs, where the result cannot or should not be written to ``path``."""
    planning_options.check_output(path)
    if path.exists() and not force and not _is_result(path, format):
        raise ValueError(
            f"--json {path}: holds something else than a result of {format}; choose another name or add --force"
        )


def _is_result(path: Path, format: str) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8") or "null")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(content, dict) and content.get("format") == format


def write_json(path: Path, result: Mapping[str, Any], settings: Mapping[str, Any], *, format: str = FORMAT) -> None:
    """Writes the result whole or not at all. Numbers that are not finite become text, which JSON allows."""
    planning_options.write_json(path, _as_json({"format": format, **result, "settings": settings}))


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value
