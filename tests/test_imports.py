"""The layers of the package: imports point downwards, and pure modules stay pure."""

import ast
import pathlib
import subprocess
import sys

import pytest

import hotspa_plugin

ROOT = pathlib.Path(hotspa_plugin.__file__).parent

# Lowest first; a package may import itself and those before it.
LAYERS = [
    "strategy", "topology", "layout", "resharding", "process_groups", "data", "cost", "search", "runtime", "cpu",
    "integrations", "report", "cli",
]  # fmt: skip
# Narrower than their place in the list.
FORBIDDEN = {
    "cpu": set(LAYERS) - {"cpu"},
    "report": {"integrations", "cpu"},
    "runtime": {"cpu"},
}
MAY_IMPORT_DISTRIBUTED = (
    "resharding.executor", "resharding.transports", "process_groups.registry", "data.exchange", "runtime",
    "integrations", "cli",
)  # fmt: skip
# Plain files and clocks inside a package that may: the report reads them, and needs no torch for it.
PURE = ("runtime.run_record", "runtime.trace", "runtime.recorder")
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
    if any(is_under(name, pure) for pure in PURE):
        return False
    for allowed in MAY_IMPORT_DISTRIBUTED:
        if is_under(name, allowed) or (allowed.endswith(".executor") and name.startswith(allowed + "_")):
            return True
    return False


def faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What ``source`` does that its layer forbids; ``module`` is its dotted name inside hotspa_plugin."""
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
        if may_import_distributed(target) and not may_import_distributed(module) and not is_package:
            found.append(f"{module} imports {name}, which may import torch.distributed, but is pure")
        if not layer:
            found.append(f"hotspa_plugin imports {name}: it must import nothing by itself")
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
    found = [fault for path, module, is_package in modules() for fault in faults(path.read_text(), module, is_package)]
    assert not found, "\n".join(found)


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(LAYERS)


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
        ("report.page", "from hotspa_plugin.runtime import launch"),
        ("runtime.trace", "import torch.distributed"),
        ("", "from hotspa_plugin.strategy import StrategyPool"),
    ],
)
def test_faults_are_found(module, source):
    assert faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("resharding.executor", "import torch.distributed as dist"),
        ("resharding.executor_rounds", "import torch.distributed as dist"),
        ("resharding.transports.gloo", "from torch import distributed"),
        ("resharding.planner", "import torch\nfrom hotspa_plugin.layout import ShardLayout"),
        ("integrations.megatron.models", "from megatron.core import parallel_state"),
        ("cli.main", "from hotspa_plugin.integrations.megatron import trainer"),
        ("report.reader", "from hotspa_plugin.runtime.run_record import RunInfo"),
        ("topology.rank_grid", "from hotspa_plugin.strategy import ParallelStrategy"),
    ],
)
def test_what_is_allowed_passes(module, source):
    assert not faults(source, module)


@pytest.mark.parametrize(
    "package",
    [
        "hotspa_plugin",
        *(f"hotspa_plugin.{name}" for name in ("strategy", "topology", "layout", "process_groups", "report")),
    ],
)
def test_import_loads_neither_torch_nor_a_framework(package):
    code = (
        f"import sys, {package}; "
        "sys.exit(', '.join(m for m in ('torch', 'megatron', 'deepspeed') if m in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, f"import {package} loaded {run.stderr.strip()}"
