"""The layers of the package: imports point downwards, and pure modules stay pure."""

import ast
import pathlib
import subprocess
import sys

import pytest

import hotspa_plugin

ROOT = pathlib.Path(hotspa_plugin.__file__).parent

# Lowest first; a package may import itself and those before it. cost is free of data: it prices lengths.
LAYERS = [
    "compatibility", "strategy", "topology", "layout", "resharding", "process_groups", "cost", "data", "search",
    "config", "runtime", "cpu", "report", "integrations",
    "deepspeed", "megatron_adaptor", "launch",  # one-line doors to the integrations
    "fuzz", "cli", "__main__",
]  # fmt: skip
# Narrower than their place in the list.
FORBIDDEN = {
    "cpu": set(LAYERS) - {"cpu"},
    "report": {"integrations", "cpu"},
    "runtime": {"cpu"},
}
MAY_IMPORT_DISTRIBUTED = (
    "resharding.executor", "resharding.transports", "process_groups.registry", "data.exchange",
    "runtime", "integrations", "deepspeed", "megatron_adaptor", "launch", "fuzz", "cli",
)  # fmt: skip
FRAMEWORKS = {"megatron", "deepspeed"}


def imported_names(source: str, module: str, is_package: bool) -> set[str]:
    """Dotted names that ``source`` imports, anywhere in it, and its uses of ``torch.distributed``.

    ``from a import b`` yields ``a.b``, since b may be a module.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            names.add("torch.distributed")
    return names


def is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def may_import_distributed(name: str) -> bool:
    """Whether module ``name`` (inside hotspa_plugin) stands on the list; executor_x counts as executor."""
    for allowed in MAY_IMPORT_DISTRIBUTED:
        if is_under(name, allowed) or (allowed.endswith(".executor") and name.startswith(allowed + "_")):
            return True
    return False


def uses_distributed(source: str, module: str, is_package: bool) -> bool:
    names = imported_names(source, f"hotspa_plugin.{module}", is_package)
    return any(is_under(name, "torch.distributed") for name in names)


def faults(source: str, module: str, is_package: bool = False, impure: frozenset[str] = frozenset()) -> list[str]:
    """What ``source`` does that its layer forbids.

    ``module`` is its dotted name inside hotspa_plugin, ``impure`` those modules that use torch.distributed.
    """
    found = []
    layer = module.split(".")[0]
    for name in sorted(imported_names(source, f"hotspa_plugin.{module}".rstrip("."), is_package)):
        if name.split(".")[0] in FRAMEWORKS and layer != "integrations":
            found.append(f"{module or 'hotspa_plugin'} imports {name}: only integrations may")
        if is_under(name, "torch.distributed") and not may_import_distributed(module):
            found.append(f"{module or 'hotspa_plugin'} reaches for {name}, but is pure")
        if not name.startswith("hotspa_plugin."):
            continue
        target = name.removeprefix("hotspa_plugin.")
        target_layer = target.split(".")[0]
        if target_layer not in LAYERS:
            continue
        # A package's __init__ gathers public names, pure or not; a module that imports them says from where.
        reached = any(is_under(target, other) for other in impure)
        if reached and not may_import_distributed(module) and not is_package:
            found.append(f"{module} imports {name}, which uses torch.distributed, but is pure")
        if not layer:
            found.append(f"hotspa_plugin imports {name}: it must import nothing by itself")
        elif layer not in LAYERS:
            found.append(f"{module} imports {name}, but package {layer} has no layer")
        elif target_layer != layer and (
            LAYERS.index(target_layer) > LAYERS.index(layer) or target_layer in FORBIDDEN.get(layer, ())
        ):
            found.append(f"{module} imports {name}: {target_layer} is not below {layer}")
    return found


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def test_every_module_keeps_to_its_layer():
    sources = [(path.read_text(encoding="utf-8"), module, is_package) for path, module, is_package in modules()]
    impure = frozenset(module for source, module, is_package in sources if uses_distributed(source, module, is_package))
    found = [fault for entry in sources for fault in faults(*entry, impure)]
    assert not found, "\n".join(found)


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(LAYERS)


IMPURE = frozenset({"resharding.executor", "process_groups.registry", "data.exchange", "runtime.engine"})


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("strategy.pool", "import torch.distributed as dist"),
        ("layout.types", "from torch import distributed"),
        ("resharding.planner", "from torch.distributed import all_reduce"),
        ("resharding.planner", "import torch\ndef f():\n    return torch.distributed.get_rank()"),
        ("resharding.planner", "from hotspa_plugin.resharding.executor import run"),
        ("resharding.planner", "from . import executor"),
        ("process_groups.plan", "from .registry import ProcessGroupRegistry"),
        ("data.packing", "from hotspa_plugin.data import exchange"),
        ("runtime.engine", "import megatron.core"),
        ("cost.time", "def f():\n    from deepspeed import zero"),
        ("strategy.pool", "from hotspa_plugin.topology import RankGrid"),
        ("layout.types", "import hotspa_plugin.runtime"),
        ("runtime.engine", "from hotspa_plugin import integrations"),
        ("cpu.redirect", "from hotspa_plugin.strategy import StrategyPool"),
        ("report.page", "from hotspa_plugin.integrations.megatron import trainer"),
        ("report.page", "from hotspa_plugin.runtime.engine import Engine"),
        ("", "from hotspa_plugin.strategy import StrategyPool"),
    ],
)
def test_faults_are_found(module, source):
    assert faults(source, module, impure=IMPURE)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("resharding.executor", "import torch.distributed as dist"),
        ("resharding.executor_rounds", "import torch.distributed as dist"),
        ("resharding.transports.gloo", "from torch import distributed"),
        ("resharding.planner", "import torch\nfrom hotspa_plugin.layout import ShardLayout"),
        ("integrations.megatron.models", "from megatron.core import parallel_state"),
        ("report.page", "from hotspa_plugin.runtime.run_record import StepRecord"),
        ("cli.main", "from hotspa_plugin.integrations.megatron import trainer"),
        ("topology.rank_grid", "from hotspa_plugin.strategy import ParallelStrategy"),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert not faults(source, module, impure=IMPURE)


@pytest.mark.parametrize(
    "package",
    ["hotspa_plugin", *(f"hotspa_plugin.{name}" for name in ("strategy", "topology", "layout", "process_groups"))],
)
def test_import_loads_neither_torch_nor_a_framework(package):
    code = (
        f"import sys, {package}; "
        "sys.exit(', '.join(m for m in ('torch', 'megatron', 'deepspeed') if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, f"import {package} loaded {run.stderr.strip()}"
