import json

import pytest

from hotspa_plugin.cost import Profile, published_model, published_models, published_profile, read_profile
from hotspa_plugin.strategy import ParallelStrategy


@pytest.fixture(scope="module")
def profile():
    return published_profile("llama-7b")


def test_a_written_profile_reads_back(profile, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json())
    assert read_profile(path) == profile


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "is no profile"),
        ('{"format": "hotspa profile", "version": 9}', "version 9"),
        ('{"format": "hotspa profile", "version": 1}', "source: Field required"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path, text, said):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=said) as refused:
        read_profile(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="no such file; hotspa profile writes one"):
        read_profile(tmp_path / "none.json")


def test_negative_figures_and_repeated_strategies_are_refused(profile):
    content = json.loads(profile.to_json())
    content["stages"][0]["b_s_per_token"] = -1.0
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        Profile.model_validate(content)
    content = json.loads(profile.to_json())
    content["stages"].append(content["stages"][0])
    with pytest.raises(ValueError, match="tp1 stands twice"):
        Profile.model_validate(content)


def test_another_model_is_refused_by_the_size_that_differs(profile):
    with pytest.raises(ValueError, match="num_layers is 32, that of llama-13b is 40"):
        profile.check_model(published_model("llama-13b"))
    profile.check_model(published_model("llama-7b").model_copy(update={"name": "mine"}))


def test_other_numbers_of_ranks_are_refused_where_figures_hold_for_one(profile):
    here = profile.model_copy(update={"machine": profile.machine.model_copy(update={"num_ranks": 4})})
    here.check_ranks(4, 4)
    with pytest.raises(ValueError, match="measured with 4 ranks.*but 8 were asked for"):
        here.check_ranks(8, 4)
    with pytest.raises(ValueError, match="use at most 8"):
        profile.check_ranks(16, 16)


def test_unknown_strategies_are_told_what_there_is(profile):
    with pytest.raises(ValueError, match="has no figures for it; it has tp1, tp1rc"):
        profile.stage(ParallelStrategy(tp=2, pp=16))


@pytest.mark.parametrize("name", published_models())
def test_figures_that_nobody_measured_are_marked(name):
    stages = published_profile(name).stages
    extrapolated = {str(s.strategy) for s in stages if s.origin == "extrapolated"}
    named = {"llama-7b": {"tp1"}, "llama-13b": set(), "llama-32b": {"tp16pp2"}}[name]
    assert extrapolated == named | {str(s.strategy) for s in stages if s.recompute == "full"}
    assert all(s.note for s in stages if s.origin == "extrapolated")


def test_the_row_for_one_stage_follows_from_two(profile):
    one, two = profile.stage(ParallelStrategy()), profile.stage(ParallelStrategy(pp=2))
    assert one.cost.packed_s([4096]) == pytest.approx(2 * two.cost.packed_s([4096]))
    # published: 1.37240947e-06, 0.094647781 and 15.047, in ms
    assert two.cost.packed_s([1000]) == pytest.approx((1.37240947 + 94.647781 + 15.047) / 1e3)


def test_recomputation_trades_time_for_memory(profile):
    for stage in profile.stages:
        if stage.recompute == "full":
            plain = profile.stage(ParallelStrategy(tp=stage.tp, pp=stage.pp))
            assert stage.cost.packed_s([4096]) > plain.cost.packed_s([4096])
            assert stage.activation_bytes_per_token < plain.activation_bytes_per_token / 3
