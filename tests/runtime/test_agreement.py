"""What ranks say of one thing, and how a difference is told. Between processes: test_disagreement."""

from hotspa_plugin.runtime.agreement import describe_differences, flatten


def test_differences_are_named_with_who_says_what():
    said = [{"pool": "tp1:64", "seed": 1}, {"pool": "tp1:64", "seed": 2}, {"pool": "tp2:64", "seed": 1, "extra": True}]
    told = describe_differences(said)
    assert 'pool is "tp1:64" on ranks 0, 1, "tp2:64" on rank 2' in told
    assert "seed is 1 on ranks 0, 2, 2 on rank 1" in told
    assert "extra is null on ranks 0, 1, true on rank 2" in told


def test_only_the_first_differences_and_the_heads_of_long_values_are_shown():
    said = [{f"key{i}": "x" * 500 + str(rank) for i in range(9)} for rank in range(2)]
    told = describe_differences(said)
    assert "key3" in told and "key4" not in told and told.endswith("and 5 more")
    assert len(told) < 1000


def test_nested_settings_get_dotted_names():
    assert flatten({"run": {"seed": 1, "record": {"first": 2}}, "pool": "tp1:4"}) == {
        "run.seed": 1, "run.record.first": 2, "pool": "tp1:4",
    }  # fmt: skip
