"""Switch plans kept in a folder, so that a resumed or repeated run need not solve for them again."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import tempfile
import zipfile
import zlib

import numpy as np

from hotspa_plugin import __version__
from hotspa_plugin.layout import ShardLayout
from hotspa_plugin.resharding.cells import cut_cells
from hotspa_plugin.resharding.plan import ReshardPlan, Routes
from hotspa_plugin.resharding.planner import build_switch_plan, check_topology

FORMAT = 2  # raise when routes come to mean something else


class PlanCache:
    """Builds switch plans, or takes them from ``directory`` where one with the same inputs lies there.

    Files are named by a hash of all that a plan depends on: both layouts, policy, nodes, cards and this package's
    version. A file that cannot be read, or whose content is not what was written, is built anew and replaced.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = pathlib.Path(directory)

    def switch_plan(
        self,
        source: ShardLayout,
        destination: ShardLayout,
        *,
        policy: str = "balanced",
        node_of_rank: np.ndarray | None = None,
        card_of_rank: np.ndarray | None = None,
    ) -> ReshardPlan:
        """What ``build_switch_plan`` returns for the same arguments."""
        nodes, cards = check_topology(node_of_rank, card_of_rank, source.num_ranks)
        path = self._directory / f"{self._key(source, destination, policy, nodes, cards)}.npz"
        kept = _read(path)
        if kept is not None:
            routes, digest = kept
            plan = ReshardPlan(
                source=source,
                destination=destination,
                policy=policy,
                cells=cut_cells(source, destination),
                routes=routes,
                node_of_rank=nodes,
                card_of_rank=cards,
            )
            if plan.digest() == digest:
                return plan
        plan = build_switch_plan(source, destination, policy=policy, node_of_rank=nodes, card_of_rank=cards)
        _write(path, plan.routes, plan.digest())
        return plan

    @staticmethod
    def _key(source: ShardLayout, destination: ShardLayout, policy: str, nodes: np.ndarray, cards: np.ndarray) -> str:
        said = hashlib.sha256()
        for text in (str(FORMAT), __version__, source.digest(), destination.digest(), policy):
            said.update(text.encode() + b"\0")
        said.update(nodes.tobytes() + cards.tobytes())
        return said.hexdigest()


def _read(path: pathlib.Path) -> tuple[Routes, str] | None:
    """The routes in a file and the digest of the plan that they belonged to."""
    try:
        with np.load(path, allow_pickle=False) as found:
            routes = Routes(**{field.name: found[field.name] for field in dataclasses.fields(Routes)})
            return routes, str(found["digest"])
    # A damaged archive is reported in any of these ways (NotImplementedError: by senseless flags of compression).
    except (OSError, KeyError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error):
        return None


def _write(path: pathlib.Path, routes: Routes, digest: str) -> None:
    """Through a file of its own that is then renamed: ranks may write the same plan at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as part:
        columns = {field.name: getattr(routes, field.name) for field in dataclasses.fields(Routes)}
        np.savez_compressed(part, digest=np.array(digest), **columns)
    os.replace(part.name, path)
