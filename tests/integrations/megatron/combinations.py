"""Small sets of cases that still try every pair of settings together."""

import itertools


def pairwise(dimensions: dict[str, tuple]) -> list[dict]:
    """Rows, each one value per dimension, such that any two values of two dimensions stand together in some row.

    Greedy: of all rows the one with most pairs not seen yet, the first where several have.
    """
    names = list(dimensions)
    rows = list(itertools.product(*(range(len(values)) for values in dimensions.values())))
    missing = set().union(*map(_pairs, rows))
    chosen = []
    while missing:
        row = max(rows, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(row)
        chosen.append({name: dimensions[name][value] for name, value in zip(names, row, strict=True)})
    return chosen


def product(dimensions: dict[str, tuple]) -> list[dict]:
    """All rows."""
    return [dict(zip(dimensions, values, strict=True)) for values in itertools.product(*dimensions.values())]


def _pairs(row):
    return set(itertools.combinations(enumerate(row), 2))
