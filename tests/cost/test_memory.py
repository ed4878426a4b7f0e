import pytest

from hotspa_plugin.cost import MemoryModel, published_profile
from hotspa_plugin.cost.memory import ALLOCATOR_GAPS
from hotspa_plugin.strategy import ParallelStrategy


def resolved(spec, num_ranks):
    return ParallelStrategy.parse(spec).resolve(num_ranks)


@pytest.fixture(scope="module")
def profile():
    return published_profile("llama-7b")


def test_home_and_slab_by_hand(profile):
    memory = MemoryModel(profile)
    h, ffn, layers, vocab = 4096, 11008, 32, 30592
    whole = layers * (4 * h * h + 3 * h * ffn + 2 * h) + 2 * vocab * h + h
    home = resolved("tp1", 8)
    assert memory.num_parameters(home) == whole
    assert memory.home_bytes(home) == pytest.approx(whole * (2 + 4 + 12 / 8), abs=1)
    assert memory.slab_bytes(home) == whole * (2 + 4)
    assert MemoryModel(profile, slab_gradients="bf16").slab_bytes(home) == whole * (2 + 2)


def test_without_a_distributed_optimizer_its_state_is_whole(profile):
    figures = profile.memory.model_copy(update={"distributed_optimizer": False})
    memory = MemoryModel(profile.model_copy(update={"memory": figures}))
    home = resolved("tp1", 8)
    assert memory.home_bytes(home) == memory.num_parameters(home) * 18


@pytest.mark.parametrize(("spec", "hot"), [("tp1", True), ("tp4pp2", True), ("tp4pp2", False), ("tp2rc", True)])
def test_the_capacity_is_the_most_that_fits(profile, spec, hot):
    memory = MemoryModel(profile)
    strategy, home = resolved(spec, 8), resolved("tp4pp2", 8)
    tokens = memory.capacity_tokens(strategy, home, hot=hot)
    assert tokens % strategy.tp == 0

    def total(count):
        return memory.bucket(strategy, home, micro_batch_tokens=count, hot=hot).total_bytes

    assert total(tokens) <= memory.limit_bytes < total(tokens + strategy.tp)


def test_what_a_profile_errs_by_is_kept_free(profile):
    strategy, home = resolved("tp2rc", 8), resolved("tp4pp2", 8)
    stages = tuple(s.model_copy(update={"memory_error": 0.1}) for s in profile.stages)
    exact, erring = MemoryModel(profile), MemoryModel(profile.model_copy(update={"stages": stages}))
    least, most = (m.bucket(strategy, home, micro_batch_tokens=4096) for m in (exact, erring))
    own = least.total_bytes - least.reserved_bytes
    assert (least.margin_bytes, most.margin_bytes) == (0, pytest.approx((0.1 + ALLOCATOR_GAPS) * own, abs=1))
    assert most.total_bytes == least.total_bytes + most.margin_bytes
    tokens = erring.capacity_tokens(strategy, home)
    assert tokens < exact.capacity_tokens(strategy, home)
    totals = [erring.bucket(strategy, home, micro_batch_tokens=n).total_bytes for n in (tokens, tokens + strategy.tp)]
    assert totals[0] <= erring.limit_bytes < totals[1]


def test_home_needs_no_slab_and_a_static_run_no_staging(profile):
    memory = MemoryModel(profile)
    home = resolved("tp4pp2", 8)
    at_home = memory.bucket(home, home, micro_batch_tokens=4096)
    away = memory.bucket(resolved("tp4pp2rc", 8), home, micro_batch_tokens=4096)
    static = memory.bucket(home, home, micro_batch_tokens=4096, hot=False)
    assert at_home.slab_bytes == 0 and away.slab_bytes > 0
    assert static.total_bytes == at_home.total_bytes - memory.staging_bytes


def test_nothing_fits_in_too_little(profile):
    memory = MemoryModel(profile, limit_bytes=10**9)
    assert memory.capacity_tokens(resolved("tp8", 8), resolved("tp8", 8)) == 0
