"""What hotspa bench train lets race, before anything is measured."""

import json

import numpy as np
import pytest

pytest.importorskip("megatron.core")

from hotspa_plugin.cli.bench_contenders import choose_contenders
from hotspa_plugin.cli.main import run
from hotspa_plugin.cost import published_profile
from hotspa_plugin.search.workloads import workload_batches

CONTEXT, TOKENS = 32768, 400_000


def choose(workload, pool="auto", home=None, limit=None, recompute=False):
    batches = workload_batches(workload, 3, batch_tokens=TOKENS, longest_tokens=CONTEXT)
    return choose_contenders(
        published_profile("llama-13b"), 8, workload, batches, TOKENS, CONTEXT, pool, home, limit, recompute, seed=0
    )


def test_every_feasible_static_strategy_races_or_is_named():
    contenders, left_out, predicted = choose("wikipedia")
    static = {c.name for c in contenders if c.kind == "static" and c.engine == "megatron"}
    assert static and static.isdisjoint(left_out)
    known = {str(s.strategy) for s in published_profile("llama-13b").stages if s.recompute == "none"}
    assert static | set(left_out) <= known | {"deepspeed"}
    assert {"tp1", "pp2"} <= set(left_out)  # 13B with its optimizer's state does not fit there
    reasons = ("fit in memory", "slower than the fastest", "is not installed")
    assert all(any(reason in why for reason in reasons) for why in left_out.values())
    assert all(predicted[name] > 0 for name in static)


def test_auto_is_hot_for_skewed_lengths_and_static_for_uniform_ones():
    (hot,) = [c for c in choose("wikipedia")[0] if c.kind == "hot"]
    assert len(hot.pool.strategies) > 1
    (hot,) = [c for c in choose("uniform")[0] if c.kind == "hot"]
    assert len(hot.pool.strategies) == 1


def test_deepspeed_trains_the_static_strategy_that_is_predicted_fastest():
    pytest.importorskip("deepspeed")
    contenders, _, predicted = choose("wikipedia")
    (theirs,) = [c for c in contenders if c.engine == "deepspeed"]
    fastest = min((c.name for c in contenders if c.kind == "static" and c is not theirs), key=predicted.get)
    assert theirs.kind == "static" and str(theirs.pool.home) == fastest


def test_the_stock_baselines_use_one_strategy_that_holds_the_context():
    contenders, _, _ = choose("wikipedia")
    padded, packed = [c for c in contenders if c.kind == "stock"]
    assert padded.packing == "padded" and packed.packing == "packed"
    assert padded.pool == packed.pool and len(padded.pool.strategies) == 1
    lengths = workload_batches("wikipedia", 1, batch_tokens=TOKENS, longest_tokens=CONTEXT)[0]
    few, many = packed.assigner.assign(lengths), padded.assigner.assign(lengths)
    assert few.num_padding_tokens < many.num_padding_tokens
    assert padded.num_rounds == 2 and padded.takes_part(2) and not padded.takes_part(3)  # far slower than the rest
    assert np.all([m.num_padded_tokens == CONTEXT for b in many.buckets for m in b.micro_batches])


def test_a_given_pool_is_taken_as_it_is_or_refused_with_the_figures():
    contenders, _, _ = choose("wikipedia", pool="pp8:3072 tp8:32768")
    assert str(contenders[0].pool) == "pp8:3072 tp8:32768"
    with pytest.raises(ValueError, match=r"tp2:4096: needs .* beside home tp8, over the limit"):
        choose("wikipedia", pool="tp2:4096 tp8:32768")


def test_options_that_contradict_each_other_are_refused(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(published_profile("llama-7b").to_json())
    assert run(["bench", "train", "--profile", str(path), "--nodes", "2"]) == 2
    assert "--nodes 2 and --link-mbit belong together" in capsys.readouterr().err
    assert run(["bench", "train", "--profile", str(path)]) == 2
    assert "is of another model" in capsys.readouterr().err
    assert json.loads(path.read_text())
