"""What ``plan``, ``simulate`` and ``profile`` share: models, profiles, files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hotspa_plugin.config import ModelConfig
    from hotspa_plugin.cost import ModelSizes, Profile

PUBLISHED = "a800"  # stands for the published figures in place of a profile file

json_option = click.option(
    "--json", "json_path", type=click.Path(path_type=Path), metavar="FILE", help="Also write the result as JSON."
)
memory_limit_option = click.option(
    "--memory-limit",
    "memory_limit_gb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Bytes of a rank, in 10^9.  [default: the device's, from the profile]",
)
slab_gradients_option = click.option(
    "--slab-gradients",
    type=click.Choice(["fp32", "bf16"]),
    default="fp32",
    show_default=True,
    help="Gradients of strategies other than home. Training accumulates in fp32; bf16 would take half the memory.",
)
recompute_option = click.option(
    "--recompute/--no-recompute",
    default=True,
    show_default=True,
    help="Consider full activation recomputation, for static strategies too.",
)

nodes_option = click.option(
    "--nodes",
    "num_nodes",
    type=click.IntRange(min=1, max=2),
    default=1,
    show_default=True,
    help="2: the ranks live in two network namespaces (needs root).",
)
link_option = click.option(
    "--link-mbit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="Speed of the link between two nodes, in Mbit/s.",
)


def checked_link(num_nodes: int, link_mbit: float | None, num_ranks: int) -> float | None:
    """The link between the nodes, None for one node. ValueError where options contradict each other."""
    if (num_nodes == 2) != (link_mbit is not None):
        raise ValueError("--nodes 2 and --link-mbit belong together: give both or none")
    if num_ranks % num_nodes:
        raise ValueError(f"--ranks {num_ranks} do not divide among {num_nodes} nodes: use an even number")
    return link_mbit


def memory_limit_bytes(memory_limit_gb: float | None) -> int | None:
    return None if memory_limit_gb is None else round(memory_limit_gb * 1e9)


def recompute_modes(recompute: bool) -> tuple[str, ...]:
    return ("none", "full") if recompute else ("none",)


def resolve_model(name: str, *, num_ranks: int, max_positions: int, dtype: str | None = None) -> ModelSizes:
    """The sizes of a published model, a preset, or the ``model`` section of a configuration file."""
    from hotspa_plugin.config.sizes import model_sizes
    from hotspa_plugin.cost import published_model, published_models

    if name in published_models():
        return published_model(name)
    config, config_dtype = read_model_config(name)
    return model_sizes(config, num_ranks=num_ranks, max_positions=max_positions, dtype=dtype or config_dtype)


def read_model_config(name: str) -> tuple[ModelConfig, str]:
    """(model, dtype) of a preset or a configuration file. ValueError naming what there is."""
    from hotspa_plugin.config import ModelConfig, read_config
    from hotspa_plugin.config.model import PRESETS
    from hotspa_plugin.cost import published_models

    if name in PRESETS:
        return ModelConfig.model_validate({"preset": name}), "fp32"
    if not Path(name).is_file():
        raise ValueError(
            f"--model {name}: is neither a file nor a known model; name a configuration file, or one of "
            f"{', '.join([*PRESETS, *published_models()])}"
        )
    config = read_config(name)
    return config.model, config.run.dtype


def resolve_profile(given: str | None, model: ModelSizes) -> Profile:
    """The profile in a file, or with ``a800`` (or nothing, for a published model) the published one."""
    from hotspa_plugin.cost import published_models, published_profile, read_profile

    if given is None:
        if model.name not in published_models():
            raise ValueError(
                f"--profile is missing: {model.name} has no published figures; measure some with hotspa profile"
            )
        return published_profile(model.name)
    if given == PUBLISHED:
        profile = published_profile(model.name)
    else:
        profile = read_profile(given)
    profile.check_model(model)
    return profile


def check_output(path: Path | None, option: str = "--json") -> None:
    """Raises ValueError, before anything runs, where a result cannot be written to ``path``."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written; choose another place")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes whole or not at all."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")  # with the permissions that the user's umask leaves
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
