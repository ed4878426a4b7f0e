"""Plans kept on disk: equal to fresh ones, told apart by all they depend on, rebuilt where damaged."""

import numpy as np
import pytest

from hotspa_plugin.resharding import build_switch_plan, plan_cache, verify_switch
from hotspa_plugin.resharding.plan_cache import PlanCache
from tests.resharding.worlds import LLAMA, layout, node_of_rank


@pytest.fixture
def pair():
    return layout(LLAMA, 8, 2, 2), layout(LLAMA, 8, 4, 1)


def test_a_kept_plan_is_used_and_equal(tmp_path, pair, monkeypatch):
    nodes = node_of_rank(8, 2)
    first = PlanCache(tmp_path).switch_plan(*pair, node_of_rank=nodes)
    assert first.digest() == build_switch_plan(*pair, node_of_rank=nodes).digest()
    assert len(list(tmp_path.iterdir())) == 1

    def refuse(*args, **kwargs):
        raise AssertionError("planned again")

    monkeypatch.setattr(plan_cache, "build_switch_plan", refuse)
    again = PlanCache(tmp_path).switch_plan(*pair, node_of_rank=nodes)
    assert again.digest() == first.digest()
    verify_switch(again)
    for changed in (
        {"node_of_rank": node_of_rank(8, 4)},
        {"node_of_rank": nodes, "policy": "fcfs"},
        {"node_of_rank": nodes, "card_of_rank": np.arange(8)},
    ):
        with pytest.raises(AssertionError, match="planned again"):
            PlanCache(tmp_path).switch_plan(*pair, **changed)
    with pytest.raises(AssertionError, match="planned again"):
        PlanCache(tmp_path).switch_plan(pair[1], pair[0], node_of_rank=nodes)


def test_a_damaged_file_is_replaced(tmp_path, pair):
    cache = PlanCache(tmp_path / "plans")
    wanted = cache.switch_plan(*pair).digest()
    (path,) = (tmp_path / "plans").iterdir()
    whole = path.read_bytes()
    flipped = [bytes([*whole[:at], whole[at] ^ 0x55, *whole[at + 1 :]]) for at in range(40, len(whole), 97)]
    # Readable as a file, but other routes than were written.
    with np.load(path) as found:
        columns = dict(found)
    columns["source_rank"] = columns["source_rank"][::-1]
    np.savez_compressed(path, **columns)
    for content in (path.read_bytes(), b"", b"not a plan", whole[:200], *flipped):
        path.write_bytes(content)
        assert cache.switch_plan(*pair).digest() == wanted
        assert cache.switch_plan(*pair).digest() == wanted
    assert len(list(path.parent.iterdir())) == 1
