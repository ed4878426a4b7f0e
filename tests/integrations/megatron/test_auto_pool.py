"""``pool: auto`` in ``hotspa train``: where the profile comes from, what is chosen, and resuming."""

import json

import pytest

from hotspa_plugin.config import parse_config
from hotspa_plugin.cost import read_profile
from hotspa_plugin.runtime.run_record import RUN_FILE, STEPS_FILE

pytestmark = pytest.mark.slow  # measures a profile

CONFIG = """
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, ffn_hidden_size: 64}}
pool: auto
data: {{source: jsonl, path: {data}, global_batch_sequences: 8, shuffle: false}}
optimizer: {{decay_style: constant}}
run: {{steps: {steps}, out: {out}, profile: {profile}, save_every: 1, resume: {resume}{further}}}
"""


def config_of(folder, *, lengths, out="run", steps=2, resume="false", further=""):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    text = CONFIG.format(
        data=data, out=folder / out, profile=folder / "profile.json", steps=steps, resume=resume, further=further
    )
    return parse_config(text)


def train(config):
    """Losses by step, and (strategy, sequences) of the last step's buckets; or what was refused."""
    import torch.distributed as dist

    from hotspa_plugin.integrations.megatron.training_run import train_rank

    try:
        records = train_rank(dist.get_rank(), dist.get_world_size(), config, keeps_records=True)
    except ValueError as error:
        return str(error)
    return [r.loss for r in records], [(b.strategy, b.sequences) for b in records[-1].buckets]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return tmp_path_factory.mktemp("auto")


@pytest.mark.ranks(2)
def test_uniform_lengths_are_measured_once_and_stay_static(workers, measured):
    config = config_of(measured, lengths=[64] * 16)
    (losses, buckets), other = workers.run(train, config=config)
    assert (losses, buckets) == other and len(buckets) == 1
    profile = read_profile(measured / "profile.json")
    assert profile.machine.num_ranks == 2 and {str(s.strategy) for s in profile.stages} >= {"tp1", "tp2", "pp2"}
    assert read_profile(measured / "run" / "profile.json") == profile
    (entry,) = json.loads((measured / "run" / RUN_FILE).read_text())["pool"]
    assert (entry["strategy"], entry["bound_tokens"]) == (buckets[0][0], 64)


def make_hot(folder):
    """The measured profile with other figures: tp1 is fast and holds little, tp2 holds all and is slow."""
    profile = read_profile(folder / "profile.json")
    figures = {
        "tp1": {"b_s_per_token": 1e-3, "activation_bytes_per_token": 1e6},
        "tp2": {"b_s_per_token": 1e-2, "activation_bytes_per_token": 1e5},
    }
    nothing = {"a_s_per_token2": 0.0, "c_s": 0.0, "activation_fixed_bytes": 0.0}
    stages = [
        stage.model_copy(update={**nothing, **figures[str(stage.strategy)]})
        for stage in profile.stages
        if str(stage.strategy) in figures
    ]
    memory = profile.memory.model_copy(update={"reserved_bytes": 0, "device_bytes": 10**9})
    changed = profile.model_copy(update={"stages": tuple(stages), "memory": memory})
    (folder / "profile.json").write_text(changed.to_json())


@pytest.mark.ranks(2)
def test_a_hot_pool_is_used_and_resumed(workers, measured):
    make_hot(measured)
    lengths = [20, 30, 200, 25, 40, 22, 35, 28] * 2
    limit = ", memory_limit_gb: 0.1"
    config = config_of(measured, lengths=lengths, out="hot", steps=3, further=limit)
    (losses, buckets), _ = workers.run(train, config=config)
    assert dict(buckets) == {"tp1": 7, "tp2": 1}
    workers.run(train, config=config_of(measured, lengths=lengths, out="again", steps=2, further=limit))
    (measured / "profile.json").write_text("{}")  # the run's own copy counts
    config = config_of(measured, lengths=lengths, out="again", steps=3, resume="true", further=limit)
    (rest, again), _ = workers.run(train, config=config)
    assert rest == losses[2:] and again == buckets
    assert len((measured / "again" / STEPS_FILE).read_text().splitlines()) == 3


@pytest.mark.ranks(2)
def test_what_cannot_be_planned_is_refused_on_every_rank(workers, measured):
    profile = measured / "profile.json"
    profile.write_text((measured / "hot" / "profile.json").read_text())
    config = config_of(measured, lengths=[200] * 8, out="refused", further=", memory_limit_gb: 0.01")
    other = config.model_copy(update={"model": parse_config("model: {preset: tiny-llama}").model})
    for rank in workers.run(train, config=config):
        assert "sequences of 200 tokens are more than any strategy can hold in 0.0100 GB a rank: the most is" in rank
    for rank in workers.run(train, config=other):
        assert "profile of 2 layers of 32 is of another model: its num_layers is 2, that of tiny-llama is 4" in rank
    profile.write_text("{")
    for rank in workers.run(train, config=config):
        assert f"profile {profile}:1: is not JSON" in rank
