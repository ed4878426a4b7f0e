"""The linear programs behind the policy ``balanced``, and behind the bounds.

Goals, in order: every rank receives exactly what it lacks; every piece enters a node that lacks it once; the
largest number of bytes that a rank sends is as small as possible, then the largest number of bytes that pass a
network card (the larger of its two directions). The first two fix who needs what; the other two are solved here.

A piece reaches a node's lacking ranks in at most two hops: directly from a holder, or through a *gateway*, one
of the lacking ranks that passes it on to the others of its node. For a demand of B bytes, in a node with m lacking
ranks, of which fraction e[g] enters through gateways of role g:

* where the node has holders, their sends s[h] satisfy  sum(s) + (m - 1) sum(e) = m,  sum(e) <= 1;
* where it has none,  sum(e) = 1,  and holders elsewhere send once per such node:  sum(S) = number of such nodes.

Every gateway sends (m - 1) e[g]. Pieces sent partly directly and partly through several gateways are mixtures of
these, so the programs lose nothing. By symmetry (see ``roles``) the ranks of a role share its load evenly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hotspa_plugin.resharding.roles import Demand, NodeClass

# The send limit of the later goals may exceed the optimum by this much: fewer bytes then take two hops.
SLACK = 2e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeFlow:
    """How one demand reaches each node of one class; fractions of the demand, summed over a role's ranks in a node."""

    demand: int
    node_class: int
    lacking_roles: tuple[int, ...]
    num_lacking: int
    sends: dict[int, float]  # per holding role of the same node; empty where the node has no holder
    enters: dict[int, float]  # per gateway role


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance:
    """A solution: flows inside nodes and between nodes, and the optima of the two linear goals in bytes."""

    flows: tuple[NodeFlow, ...]
    across: dict[int, dict[tuple[int, int], float]]  # demand -> (node class, role) -> copies sent, over all its ranks
    max_send_bytes: float
    max_card_bytes: float


class _Program:
    """A linear program under construction: rows of (column, coefficient)."""

    def __init__(self) -> None:
        self.num_columns = 0
        self.entries: dict[str, tuple[list[int], list[int], list[float]]] = {
            kind: ([], [], []) for kind in ("at_most", "equal")
        }
        self.right: dict[str, list[float]] = {"at_most": [], "equal": []}

    def columns(self, count: int) -> list[int]:
        first = self.num_columns
        self.num_columns += count
        return list(range(first, first + count))

    def row(self, kind: str, terms: Sequence[tuple[int, float]], right: float) -> None:
        rows, columns, values = self.entries[kind]
        number = len(self.right[kind])
        for column, value in terms:
            rows.append(number)
            columns.append(column)
            values.append(value)
        self.right[kind].append(right)

    def solve(self, objective: dict[int, float], limits: dict[int, float]) -> np.ndarray:
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix

        def matrix(kind: str):
            rows, columns, values = self.entries[kind]
            return coo_matrix((values, (rows, columns)), shape=(len(self.right[kind]), self.num_columns)).tocsr()

        cost = np.zeros(self.num_columns)
        cost[list(objective)] = list(objective.values())
        upper = np.full(self.num_columns, np.inf)
        upper[list(limits)] = list(limits.values())
        result = linprog(
            cost,
            A_ub=matrix("at_most"),
            b_ub=self.right["at_most"],
            A_eq=matrix("equal"),
            b_eq=self.right["equal"],
            bounds=np.stack([np.zeros(self.num_columns), upper], axis=1),
            method="highs-ds",
        )
        assert result.status == 0, f"linear program for sender balance: {result.message}"
        return result.x


def solve_balance(demands: Sequence[Demand], classes: Sequence[NodeClass], *, bounds_only: bool = False) -> Balance:
    """Solves the goals that come after the least bytes between ranks and between nodes.

    With ``bounds_only`` the flows are left empty.
    """
    program = _Program()
    (send_limit, card_limit) = program.columns(2)
    sent: dict[tuple[int, int], list[tuple[int, float]]] = {}  # (class, role) -> terms of bytes per rank
    card: dict[tuple[int, int, str], list[tuple[int, float]]] = {}  # (class, kind, direction) -> bytes per card
    unit = float(max((d.num_bytes for d in demands), default=1)) or 1.0
    pending = []  # (demand, class, lacking roles, m, {role: column of sends}, {role: column of entries})
    across_columns: dict[int, dict[tuple[int, int], int]] = {}
    optional: dict[int, float] = {}  # forwards that a direct send could replace, with their weight

    for number, demand in enumerate(demands):
        weight = demand.num_bytes / unit
        needy_nodes = 0
        for at, nodes in enumerate(classes):
            roles = range(len(nodes.source_holding))
            holding = [r for r in roles if nodes.source_holding[r] in demand.sources]
            lacking = [
                r
                for r in roles
                if nodes.destination_holding[r] in demand.destinations and nodes.source_holding[r] not in demand.sources
            ]
            m = sum(len(nodes.columns_of_role[r]) for r in lacking)
            if m == 0:
                continue
            sends = dict(zip(holding, program.columns(len(holding)), strict=True))
            gateways = lacking if m > 1 or not holding else []
            enters = dict(zip(gateways, program.columns(len(gateways)), strict=True))
            pending.append((number, at, lacking, m, sends, enters))
            for role, column in sends.items():
                sent.setdefault((at, role), []).append((column, weight / len(nodes.columns_of_role[role])))
            for role, column in enters.items():
                share = weight / len(nodes.columns_of_role[role])
                sent.setdefault((at, role), []).append((column, (m - 1) * share))
                if not holding:
                    kind = nodes.card_class[role]
                    card.setdefault((at, kind, "in"), []).append((column, weight / nodes.num_cards[kind]))
            if holding:
                program.row("equal", [(c, 1) for c in sends.values()] + [(c, m - 1) for c in enters.values()], m)
                if enters:
                    program.row("at_most", [(c, 1) for c in enters.values()], 1)
                optional.update((c, weight * (m - 1) * nodes.num_nodes) for c in enters.values())
            else:
                program.row("equal", [(c, 1) for c in enters.values()], 1)
                needy_nodes += nodes.num_nodes
        if needy_nodes:
            columns = {}
            for at, nodes in enumerate(classes):
                for role, holding_of_role in enumerate(nodes.source_holding):
                    if holding_of_role not in demand.sources:
                        continue
                    (column,) = program.columns(1)
                    columns[at, role] = column
                    share = weight / nodes.num_nodes
                    sent.setdefault((at, role), []).append((column, share / len(nodes.columns_of_role[role])))
                    kind = nodes.card_class[role]
                    card.setdefault((at, kind, "out"), []).append((column, share / nodes.num_cards[kind]))
            program.row("equal", [(c, 1) for c in columns.values()], needy_nodes)
            across_columns[number] = columns

    if not pending:
        return Balance(flows=(), across={}, max_send_bytes=0, max_card_bytes=0)
    for terms in sent.values():
        program.row("at_most", [*terms, (send_limit, -1)], 0)
    for terms in card.values():
        program.row("at_most", [*terms, (card_limit, -1)], 0)

    x = program.solve({send_limit: 1.0}, {})
    best_send = float(x[send_limit])
    best_card = 0.0
    if card:
        x = program.solve({card_limit: 1.0}, {send_limit: best_send * (1 + 1e-9) + 1e-12})
        best_card = float(x[card_limit])
    if not bounds_only and optional:
        limits = {send_limit: best_send * (1 + SLACK), card_limit: best_card * (1 + SLACK) + 1e-12}
        x = program.solve(optional, limits)
    flows = tuple(
        NodeFlow(
            demand=number,
            node_class=at,
            lacking_roles=tuple(lacking),
            num_lacking=m,
            sends={role: float(x[c]) for role, c in sends.items()},
            enters={role: float(x[c]) for role, c in enters.items()},
        )
        for number, at, lacking, m, sends, enters in ([] if bounds_only else pending)
    )
    across = {number: {key: float(x[c]) for key, c in cs.items()} for number, cs in across_columns.items()}
    return Balance(flows=flows, across=across, max_send_bytes=best_send * unit, max_card_bytes=best_card * unit)
