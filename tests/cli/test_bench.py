"""``hotspa bench switch``: plans to JSON, and what it refuses."""

import json
import xml.etree.ElementTree

import pytest

from hotspa_plugin.cli.main import run

ONE_CASE = ["bench", "switch", "--ranks", "0", "--plan-ranks", "8", "--model", "llama-7b", "--policy", "balanced"]


def test_plans_are_written_with_their_bounds(tmp_path):
    path = tmp_path / "plans.json"
    picture = tmp_path / "traffic.svg"
    assert run([*ONE_CASE, "--json", str(path), "--picture", str(picture)]) == 0
    drawn = xml.etree.ElementTree.parse(picture)  # well formed
    assert any("rank 0 to rank" in title.text for title in drawn.iter("{http://www.w3.org/2000/svg}title"))
    content = json.loads(path.read_text())
    assert content["measured"] == [] and len(content["plans"]) > 5
    for row in content["plans"]:
        assert row["policy"] == "balanced" and row["num_ranks"] == 8
        assert row["remote_bytes"] == row["remote_bytes_bound"]
        assert row["cross_node_bytes"] == row["cross_node_bytes_bound"]
        assert row["max_send_bytes"] <= 1.01 * row["max_send_bytes_bound"] + 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--ranks", "0", "--plan-ranks", "7"], "7 ranks"),
        (["--ranks", "0", "--model", "llama-1b"], "llama-1b"),
        (["--ranks", "0", "--policy", "best"], "best"),
        (["--no-plans", "--cases", "tp4"], "tp4"),
        (["--no-plans", "--cases", "tp3:tp1"], "world size 4"),
        (["--no-plans", "--cases", ","], "--cases"),
        (["--no-plans", "--nodes", "2"], "--link-mbit"),
        (["--no-plans", "--picture", "x.svg"], "--no-plans"),
    ],
)
def test_what_does_not_fit_is_named(arguments, named, capsys):
    assert run(["bench", "switch", *arguments]) == 2
    message = capsys.readouterr().err
    assert named in message and len(message.strip().splitlines()) == 1
