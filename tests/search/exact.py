"""The least possible time of a batch over a pool, by mixed-integer programming. For small cases only."""

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from hotspa_plugin.search import StrategyOption


def least_seconds(options: list[StrategyOption], lengths: list[int], *, num_slots: int, time_limit_s: float = 20.0):
    """(best seconds found, lower bound).

    Each replica of each option has ``num_slots`` micro-batches. Variables: x = sequence in slot, u = slot used,
    z = option used, w = largest micro-batch of a replica, T = time of an option: the largest of its replicas' sums of
    micro-batches plus (stages - 1) times w. Packed micro-batches only.
    """
    slots = [(o, r, m) for o, opt in enumerate(options) for r in range(opt.spec.num_replicas) for m in range(num_slots)]
    replicas = sorted({(o, r) for o, r, _ in slots})
    n, s = len(lengths), len(slots)
    x, u = 0, n * s
    z, w = u + s, u + s + len(options)
    t = w + len(replicas)
    total = t + len(options)
    cost = np.zeros(total)
    cost[z : z + len(options)] = [o.transition_s for o in options]
    cost[t:] = 1.0
    rows, low, high = [], [], []

    def row(terms, lowest, highest):
        rows.append(terms)
        low.append(lowest)
        high.append(highest)

    lower, upper = np.zeros(total), np.full(total, np.inf)
    upper[:w] = 1.0
    work = [option.cost.sequences_s(lengths) for option in options]
    for i in range(n):
        row([(x + i * s + j, 1.0) for j in range(s)], 1, 1)
        for j, (o, _, _) in enumerate(slots):
            if lengths[i] > options[o].spec.capacity_tokens:
                upper[x + i * s + j] = 0.0
    for j, (o, r, m) in enumerate(slots):
        option = options[o]
        row(
            [(x + i * s + j, float(lengths[i])) for i in range(n)] + [(u + j, -option.spec.capacity_tokens)], -np.inf, 0
        )
        row([(u + j, 1.0), (z + o, -1.0)], -np.inf, 0)
        of_slot = [(x + i * s + j, work[o][i]) for i in range(n)] + [(u + j, option.cost.c_s)]
        row([*of_slot, (w + replicas.index((o, r)), -1.0)], -np.inf, 0)
        if m:
            row([(u + j, 1.0), (u + j - 1, -1.0)], -np.inf, 0)  # slots fill in order
    for k, (o, r) in enumerate(replicas):
        option = options[o]
        terms = [(t + o, -1.0), (w + k, option.spec.num_stages - 1.0)]
        for j, slot in enumerate(slots):
            if slot[:2] == (o, r):
                terms += [(x + i * s + j, work[o][i]) for i in range(n)] + [(u + j, option.cost.c_s)]
        row(terms, -np.inf, 0)
    entries = [(i, column, value) for i, terms in enumerate(rows) for column, value in terms]
    row_of, column_of, values = zip(*entries, strict=True)
    matrix = coo_matrix((values, (row_of, column_of)), shape=(len(rows), total)).tocsr()
    integrality = np.zeros(total)
    integrality[:w] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, low, high),
        bounds=Bounds(lower, upper),
        integrality=integrality,
        options={"time_limit": time_limit_s, "mip_rel_gap": 1e-3},
    )
    return (np.inf if result.fun is None else float(result.fun)), float(result.mip_dual_bound)
