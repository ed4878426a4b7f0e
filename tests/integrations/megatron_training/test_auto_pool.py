"""``--hotspa-pool auto`` and ``--hotspa-assignment batch`` in real runs of Megatron's training loop."""

import json

import pytest

from hotspa_plugin.cost import Profile, published_profile
from hotspa_plugin.cost.profile import MachineFigures, ModelSizes, StageFigures
from tests.integrations.megatron_training.comparing import relative

pytestmark = pytest.mark.gloo

STATIC = "--tensor-model-parallel-size 4"


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Figures by which tp1 is fast and holds little, and tp4 is slow and holds all."""

    def stage(tp, seconds, num_bytes):
        return StageFigures(tp=tp, pp=1, a_s_per_token2=0, b_s_per_token=seconds, c_s=1e-5, origin="measured",
                            activation_bytes_per_token=num_bytes, time_error=0.05)  # fmt: skip

    model = ModelSizes(name="tiny", num_layers=4, hidden_size=32, ffn_hidden_size=96, num_attention_heads=8,
                       num_query_groups=4, head_dim=4, vocab_size=256, dtype="float32")  # fmt: skip
    base = published_profile("llama-7b")
    changes = {"device_bytes": 10**8, "reserved_bytes": 0, "parameter_bytes": 4, "optimizer_bytes": 8}
    content = {
        **base.model_dump(),
        "model": model.model_dump(),
        "machine": MachineFigures(name="none", ranks_per_node=4, num_ranks=4).model_dump(),
        "stages": [stage(1, 1e-2, 1.5e6).model_dump(), stage(4, 1e-1, 1e5).model_dump()],
        "memory": base.memory.model_copy(update=changes).model_dump(),
    }
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(Profile.model_validate(content).to_json())
    return path


@pytest.mark.slow
def test_auto_plans_for_the_documents_and_trains_like_static(pretrain, profile):
    auto = pretrain(f"--hotspa-pool auto --hotspa-profile {profile} --hotspa-memory-limit-gb 0.1")
    assert auto.code == 0, auto.errors
    assert "--hotspa-home tp" in auto.output and "times as fast as static tp4:128" in auto.output
    assert " hotspa | tp1:" in auto.output and "tp4:128" in auto.output
    static = pretrain(STATIC)
    assert max(relative(auto.losses, static.losses)) < 1e-5


def test_what_auto_cannot_plan_is_refused(pretrain, profile, tmp_path):
    flags = f"--hotspa-pool auto --hotspa-profile {profile}"
    for more, said in [
        ("--hotspa-memory-limit-gb 0.01", "sequences of 128 tokens are more than any strategy can hold in 0.0100 GB"),
        ("--hotspa-home tp1", "--hotspa-pool auto chooses its home"),
        ("--hotspa-sample-unit sample", "give --hotspa-lengths"),
    ]:
        refused = pretrain(f"{flags} {more}")
        assert refused.code == 2 and said in refused.errors, refused.errors
    other = json.loads(profile.read_text())
    other["model"]["num_layers"] = 8
    (tmp_path / "other.json").write_text(json.dumps(other))
    refused = pretrain(f"--hotspa-pool auto --hotspa-profile {tmp_path / 'other.json'}")
    assert refused.code == 2 and "is of another model: its num_layers is 8" in refused.errors
