import dataclasses

import pytest

from hotspa_plugin.data import draw_lengths
from hotspa_plugin.search import paper_settings, simulate


def run(model, num_ranks, context, slab_gradients):
    return simulate(
        model,
        num_ranks,
        context,
        lambda seed: draw_lengths("wikipedia", 128, seed=seed, max_tokens=context),
        global_batch_sequences=128,
        settings=[p for p in paper_settings() if (p.model, p.num_ranks) == (model, num_ranks)],
        slab_gradients=slab_gradients,
    )


@pytest.mark.parametrize(("model", "num_ranks"), [("llama-7b", 8), ("llama-13b", 16)])
def test_not_slower_than_static_and_than_the_papers_pools_where_those_fit(model, num_ranks):
    result = run(model, num_ranks, 32768, "bf16")
    ours_s = result.ours.mean.total_s
    assert result.gain >= 1
    fitting = [paper.prediction for paper in result.paper if paper.prediction]
    assert fitting
    for prediction in fitting:
        assert ours_s <= prediction.mean.total_s


def test_pools_that_do_not_fit_say_so():
    result = run("llama-13b", 8, 32768, "fp32")
    (paper,) = result.paper
    assert paper.prediction is None
    assert "tp2:4096: needs" in paper.misfit and "lower its bound to" in paper.misfit


def test_the_papers_pools_are_cut_at_the_context():
    setting = next(p for p in paper_settings() if p.name == "llama-7b on 8, four buckets")
    assert [str(e) for e in setting.up_to(32768)] == ["tp1:4096", "tp2:8192", "tp2pp2:16384", "tp4pp2:32768"]
    assert [str(e) for e in setting.up_to(8192)] == ["tp1:4096", "tp2:8192"]
    assert [str(e) for e in setting.up_to(6000)] == ["tp1:4096", "tp2:6000"]
    for entry in dataclasses.replace(setting).entries:
        assert entry.strategy.resolve(8)
