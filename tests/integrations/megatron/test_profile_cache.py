"""The profile that planning keeps for itself: read back, and measured anew where the file is damaged."""

import pytest
import torch.distributed as dist

from hotspa_plugin.cost import published_profile
from hotspa_plugin.integrations.megatron import profile_cache
from hotspa_plugin.integrations.megatron.profile_cache import obtain_profile
from hotspa_plugin.integrations.megatron.profiling import ProfileRequest


@pytest.fixture
def world(monkeypatch, tmp_path):
    monkeypatch.setattr(profile_cache, "machine_name", lambda: "here")  # it asks Megatron's devices
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path / "hotspa"
    dist.destroy_process_group()


def test_a_damaged_cached_profile_is_measured_anew_and_a_named_one_refused(world):
    profile = published_profile("llama-7b")
    profile = profile.model_copy(update={"machine": profile.machine.model_copy(update={"num_ranks": None})})
    request = ProfileRequest(model=None, sizes=profile.model, strategies=(), fitted_lengths=(64,), unseen_lengths=(96,))
    measured, told = [], []

    def measure(request, progress):
        measured.append(request)
        return profile

    def obtain(path=None):
        return obtain_profile(path, request, tell=told.append, measure=measure)

    assert obtain() == obtain() == profile and len(measured) == 1
    (kept,) = world.iterdir()
    whole = kept.read_text()
    for damaged in ("", whole[: len(whole) // 2], whole.replace('"num_layers"', '"num_lay3rs"')):
        kept.write_text(damaged)
        before = len(measured)
        assert obtain() == profile and len(measured) == before + 1
        assert kept.read_text() == whole and any("it is replaced" in one for one in told)
        kept.write_text(damaged)
        with pytest.raises(ValueError, match=str(kept)):
            obtain(kept)
        assert len(measured) == before + 1
