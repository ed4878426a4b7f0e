"""What ``hotspa doctor`` says of a DeepSpeed configuration. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from hotspa_plugin.compatibility import installed_version, judge
from hotspa_plugin.integrations.deepspeed.config_block import KEY, load_config, read_block
from hotspa_plugin.integrations.deepspeed.refusals import find_problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigFinding:
    """``status`` is ok, note (worth knowing) or problem (training would be refused)."""

    subject: str
    status: str
    text: str


def examine_config(path: str | Path, *, num_ranks: int | None = None) -> Iterator[ConfigFinding]:
    """Whether hot switching would be active under the configuration at ``path``, and what would be refused."""

    def finding(subject: str, status: str, text: str) -> ConfigFinding:
        return ConfigFinding(subject=subject, status=status, text=text)

    try:
        config = load_config(path)
        block = read_block(config)
    except ValueError as error:
        yield finding(str(path), "problem", str(error))
        return
    if block is None:
        why = "is switched off (enabled: false)" if KEY in config else "is absent"
        yield finding(KEY, "note", f"the block {why}: DeepSpeed trains as without the plugin")
        return
    active = "active where hotspa_plugin.deepspeed is imported, or its initialize is called"
    pool = None if block.is_auto else block.parse_pool()
    yield finding(KEY, "ok", f"{active}: pool " + (f"{pool}, home {pool.home}" if pool else "auto, planned at start"))
    if pool is not None and num_ranks is not None:
        try:
            pool.check(world_size=num_ranks)
            yield finding(f"{KEY}.pool", "ok", f"fits {num_ranks} ranks")
        except ValueError as error:
            yield finding(f"{KEY}.pool", "problem", str(error))
    for problem in find_problems(config):
        subject, _, text = problem.partition(": ")
        yield finding(subject, "problem", text)
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else 0
    if stage in (2, 3):
        stays = "home's weights and gradients stay whole on every rank"
        yield finding("zero_optimization.stage", "note", f"{stage} saves little more than 1: {stays}")
    for package in ("deepspeed", "transformers"):
        version = installed_version(package)
        if version is None:
            yield finding(package, "problem", "is not installed: pip install 'hotspa-plugin[deepspeed]'")
            continue
        verdict = judge(package, version)
        yield finding(package, "ok" if verdict.status == "tested" else "note", verdict.text or version)
