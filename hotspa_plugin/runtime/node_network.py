"""Two nodes on one machine: network namespaces joined by a link of a chosen speed, to measure what crosses nodes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # of setns(2)
_INTERFACE = "hotspa0"
_BURST_BYTES = 256 * 1024
_QUEUE_MS = 100
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankNetwork:
    """Where a rank process lives: its namespace, the interface to the other node, and rank 0's address."""

    namespace: str
    interface: str
    store_address: str

    def enter(self) -> None:
        """Moves the calling thread, and those it will start, into the namespace; before anything opens a socket."""
        with open(Path("/run/netns") / self.namespace) as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"namespace {self.namespace} cannot be entered")
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


class ThrottledNodes:
    """Two namespaces whose link passes ``link_mbit`` megabits a second each way, while the context lasts.

    Needs root and the programs ip and tc (iproute2). ValueError where they are missing or refuse.

        with ThrottledNodes(link_mbit=1000) as nodes, WorkerPool(4, networks=nodes.networks(4)) as workers:
    """

    num_nodes = 2

    def __init__(self, *, link_mbit: float) -> None:
        if link_mbit <= 0:
            raise ValueError(f"link of {link_mbit} Mbit/s: must be above 0")
        self.link_mbit = link_mbit
        stem = f"hotspa-{os.getpid()}-{next(_numbers)}"
        self.namespaces = tuple(f"{stem}-{node}" for node in range(self.num_nodes))

    def networks(self, num_ranks: int) -> tuple[RankNetwork, ...]:
        """One entry per rank, the first half of the ranks on the first node."""
        if num_ranks % self.num_nodes:
            raise ValueError(f"{num_ranks} ranks do not divide among {self.num_nodes} nodes: use an even number")
        per_node = num_ranks // self.num_nodes
        return tuple(
            RankNetwork(
                namespace=self.namespaces[rank // per_node], interface=_INTERFACE, store_address=self._address(0)
            )
            for rank in range(num_ranks)
        )

    @staticmethod
    def _address(node: int) -> str:
        return f"10.231.77.{node + 1}"

    def __enter__(self) -> ThrottledNodes:
        first, second = self.namespaces
        try:
            for namespace in self.namespaces:
                _run("ip", "netns", "add", namespace)
            _run("ip", "-n", first, "link", "add", _INTERFACE, "type", "veth",
                 "peer", "name", _INTERFACE, "netns", second)  # fmt: skip
            for node, namespace in enumerate(self.namespaces):
                _run("ip", "-n", namespace, "addr", "add", f"{self._address(node)}/24", "dev", _INTERFACE)
                for interface in ("lo", _INTERFACE):
                    _run("ip", "-n", namespace, "link", "set", interface, "up")
                _run("tc", "-n", namespace, "qdisc", "add", "dev", _INTERFACE, "root", "tbf", "rate",
                     f"{self.link_mbit:g}mbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            for namespace in self.namespaces:
                subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def rank_networks(num_ranks: int, link_mbit: float | None) -> Iterator[tuple[RankNetwork, ...] | None]:
    """The networks of ranks on two nodes joined by such a link; None, for one node, where no link is given."""
    if link_mbit is None:
        yield None
        return
    with ThrottledNodes(link_mbit=link_mbit) as nodes:
        yield nodes.networks(num_ranks)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError(f"two nodes on one machine need the program {command[0]}: install iproute2") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise ValueError(
            f"two nodes on one machine need root and network namespaces: {' '.join(command)} said "
            f"{said[-1] if said else done.returncode!r}"
        )
