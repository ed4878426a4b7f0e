"""Hot switching changes no number: pools, models, dtypes, packings and optimizers against one process."""

import math
import re

import pytest

from hotspa_plugin.integrations.megatron.verify import verify_case
from hotspa_plugin.integrations.megatron.verify_worker import VerifyCase

from .checks import assert_exact, mostly_slow
from .combinations import pairwise, product

# Buckets of every pool are used, one is left empty in the second step, and one sequence has no target.
POOLS_OF_4 = {
    "tp2pp2": ("tp1:64 tp2:256 tp2pp2:1024", None),
    "tp4": ("tp1:64 pp2:256 tp4:1024", None),
    "home_pp4": ("pp4:128 tp1:512", "pp4"),
}
LENGTHS = ((7, 129, 1, 64, 300, 65, 33), (5, 257))
POOLS_OF_8 = {"tp4pp2": ("tp1:64 tp2pp2:256 tp4pp2:1024", None)}

SETTINGS = {
    "model": ("tiny-llama", "tiny-gpt"),
    "dtype": ("fp32", "bf16"),
    "packing": ("packed", "padded"),
    "optimizer": ("adam", "distributed"),
    "sp": ("sp", "nosp"),
}
FURTHER = {
    "recompute": ("", "rcs", "rc"),
    "policy": ("balanced", "new_greedy"),
    "budget": (None, 200_000),  # bytes: a dozen rounds for each switch
    "overlap": ("none", "flush", "both"),
}
PLAIN = {name: values[0] for name, values in FURTHER.items()}


def with_suffixes(pool, *, sp, recompute=""):
    """The pool's text with sequence parallel off where asked for, and a recomputation for all but its last entry."""

    def rewrite(match):
        strategy, bound = match[1], match[2]
        suffix = "nosp" if sp == "nosp" and re.search(r"tp[2-9]", strategy) else ""
        return f"{strategy}{suffix}{recompute}:{bound}"

    return re.sub(r"(\w+):(\d+)", rewrite, pool)


def as_param(pools, row):
    pool, home = pools[row["pool"]]
    suffixes = {"sp": row["sp"], "recompute": row["recompute"]}
    case = VerifyCase(
        pool=with_suffixes(pool, **suffixes),
        home=home and with_suffixes(f"{home}:1", **suffixes).partition(":")[0],
        model=row["model"],
        dtype=row["dtype"],
        packing=row["packing"],
        distributed_optimizer=row["optimizer"] == "distributed",
        policy=row["policy"],
        switch_memory_bytes=row["budget"],
        overlap=row["overlap"],
        lengths=LENGTHS,
    )
    budget = f"{row['budget']}B" if row["budget"] else ""
    return pytest.param(case, id="-".join(filter(None, map(str, {**row, "budget": budget}.values()))))


def core(pools, further=FURTHER):
    return [as_param(pools, {**row, **PLAIN, **row}) for row in pairwise({"pool": tuple(pools), **SETTINGS, **further})]


def full(pools):
    """All combinations of the main settings; the further ones take turns, each with each other equally often."""
    further = product(FURTHER)
    rows = product({"pool": tuple(pools), **SETTINGS})
    stride = next(n for n in range(len(further) // 2, len(further)) if math.gcd(n, len(further)) == 1)
    return [as_param(pools, {**row, **further[i * stride % len(further)]}) for i, row in enumerate(rows)]


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", core(POOLS_OF_4))
def test_4_ranks(workers, case):
    assert_exact(verify_case(workers, case))


@pytest.mark.ranks(8)
@pytest.mark.parametrize("case", mostly_slow(*core(POOLS_OF_8, further={}), always=0))
def test_8_ranks(workers, case):
    assert_exact(verify_case(workers, case))


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", full(POOLS_OF_4))
def test_all_on_4_ranks(workers, case):
    assert_exact(verify_case(workers, case))


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize("case", full(POOLS_OF_8))
def test_all_on_8_ranks(workers, case):
    assert_exact(verify_case(workers, case))


def test_pairwise_rows_hold_every_pair():
    dimensions = {"a": (1, 2, 3), "b": (4, 5), "c": (6, 7), "d": (8, 9, 10)}
    rows = pairwise(dimensions)
    assert len(rows) < math.prod(map(len, dimensions.values())) / 2
    for first in dimensions:
        for second in set(dimensions) - {first}:
            seen = {(row[first], row[second]) for row in rows}
            assert seen == set((x, y) for x in dimensions[first] for y in dimensions[second])
