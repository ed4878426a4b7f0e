"""``"pool": "auto"`` and per-batch assignment under DeepSpeed's engine."""

from __future__ import annotations

import pytest

from hotspa_plugin.cost import Profile, published_profile
from hotspa_plugin.cost.profile import MachineFigures, ModelSizes, StageFigures
from tests.integrations.deepspeed import work
from tests.integrations.deepspeed.test_exact import check_equal

WORK = "tests.integrations.deepspeed.work"
BATCHES = [[7, 65, 40, 64, 200, 150, 20, 33], [12, 13, 14], [250, 3]]
LENGTHS = [20, 30, 25, 40, 22, 35, 28, 250]


def write_profile(path, *, num_layers=2):
    """Figures by which tp1 is fast and holds little, and tp4 is slow and holds all; tp2pp2 would be faster still."""
    model = ModelSizes(name="tiny", num_layers=num_layers, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8,
                       num_query_groups=4, head_dim=4, vocab_size=96, dtype="float32")  # fmt: skip

    def stage(tp, pp, seconds, num_bytes):
        return StageFigures(tp=tp, pp=pp, a_s_per_token2=0, b_s_per_token=seconds, c_s=1e-5, origin="measured",
                            activation_bytes_per_token=num_bytes, time_error=0.05).model_dump()  # fmt: skip

    base = published_profile("llama-7b")
    memory = base.memory.model_copy(update={"device_bytes": 10**8, "reserved_bytes": 0, "parameter_bytes": 4,
                                            "optimizer_bytes": 8})  # fmt: skip
    profile = Profile.model_validate(
        {
            **base.model_dump(),
            "model": model.model_dump(),
            "machine": MachineFigures(name="none", ranks_per_node=4, num_ranks=4).model_dump(),
            "stages": [stage(1, 1, 1e-2, 1e6), stage(4, 1, 1e-1, 1e5), stage(2, 2, 1e-5, 1e5)],
            "memory": memory.model_dump(),
        }
    )
    path.write_text(profile.to_json())
    return str(path)


def lengths_file(folder, lengths=LENGTHS):
    path = folder / "lengths.txt"
    path.write_text("\n".join(map(str, lengths)))
    return str(path)


def planned(pool, profile, **changes):
    """(pool, why) by one process; what ranks do."""
    work.prepare()
    from hotspa_plugin.integrations.deepspeed import auto_pool
    from hotspa_plugin.integrations.deepspeed.config_block import read_block

    block = read_block({"hotspa": {"pool": pool, "profile": profile, **changes}})
    block, assigner, why = auto_pool.choose(
        block, work.make_model("llama"), None, world_size=4, num_sequences=8, distributed=True
    )
    return block, assigner, why


def test_skewed_lengths_get_a_pool_and_uniform_ones_a_static_strategy(tmp_path):
    profile = write_profile(tmp_path / "profile.json")
    block, assigner, why = planned("auto", profile, lengths=lengths_file(tmp_path))
    assert set(map(str, block.parse_pool().strategies)) == {"tp1", "tp4"}  # Hugging Face models have no pipeline
    assert assigner.assign([250, 20]).num_sequences == 2 and "times as fast as static" in why
    block, _, _ = planned("auto", profile, lengths=lengths_file(tmp_path, [40] * 8), longest_tokens=64)
    assert len(block.parse_pool().strategies) == 1


def test_a_profile_of_another_model_is_refused(tmp_path):
    profile = write_profile(tmp_path / "profile.json", num_layers=4)
    said = r"hotspa\.profile .* of another model: its num_layers is 4.*num_hidden_layers is 2"
    with pytest.raises(ValueError, match=said):
        planned("auto", profile, lengths=lengths_file(tmp_path))


def test_lengths_must_be_known(tmp_path):
    with pytest.raises(ValueError, match=r"hotspa\.lengths is missing"):
        planned("auto", write_profile(tmp_path / "profile.json"))


@pytest.mark.slow
@pytest.mark.gloo
def test_training_is_exact_with_batches_divided_by_their_own_lengths(workers, tmp_path):
    profile = write_profile(tmp_path / "profile.json")
    config = work.ds_config(
        pool="auto", stage=1, block={"profile": profile, "lengths": lengths_file(tmp_path), "longest_tokens": 256}
    )
    hot = workers.run(f"{WORK}:train", family="llama", config=config, batches=BATCHES)[0]
    expected = workers.run_reference(f"{WORK}:train_reference", family="llama", batches=BATCHES)
    check_equal(hot, expected)
