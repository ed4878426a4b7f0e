"""What is said about versions of other packages, at a start and by the doctor."""

import warnings

import pytest

from hotspa_plugin.compatibility import TESTED, check_start, judge


@pytest.mark.parametrize(
    ("package", "version", "status"),
    [
        ("torch", "2.14.1+cpu", "tested"),
        ("torch", "2.99.0a0+git1", "untested"),
        ("torch", "2.10.0", "untested"),
        ("torch", "2.5.1", "refused"),
        ("torch", "unknown", "untested"),
        ("megatron-core", "0.16.1", "tested"),
        ("megatron-core", "0.19.2", "tested"),
        ("megatron-core", "0.20.0rc0", "untested"),
        ("megatron-core", "0.9.0", "refused"),
        ("deepspeed", "0.19.8", "tested"),
        ("deepspeed", "0.16.0", "untested"),
    ],
)
def test_a_version_is_judged_by_its_release(package, version, status):
    verdict = judge(package, version)
    assert verdict.status == status
    assert bool(verdict.text) == (status != "tested")
    if verdict.text:
        assert verdict.text.startswith(f"{package} {version} is ")
        assert str(TESTED[package]) in verdict.text


def test_a_start_warns_on_the_first_rank_and_refuses_what_cannot_work(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0 is not among the tested releases 2\.13, 2\.14"):
        check_start({"megatron-core": "0.19.2", "torch": "2.99.0"})
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.15\.0 is too old \(.*\): install 0\.16 or newer"):
        check_start({"megatron-core": "0.15.0"})
    monkeypatch.setenv("RANK", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_start({"torch": "2.99.0"})


def test_the_versions_at_hand_are_tested():
    from hotspa_plugin.compatibility import installed_version

    for package in ("torch", "megatron-core"):
        version = installed_version(package)
        assert version is not None
        assert judge(package, version).status == "tested"
