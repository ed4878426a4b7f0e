import numpy as np
import pytest

from hotspa_plugin.topology import Cluster, Links, cards_of_nodes


def test_nodes_and_cards():
    cluster = Cluster(num_ranks=10, ranks_per_node=4, cards_per_node=2)
    assert cluster.node_of_rank.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert cluster.card_of_rank.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert cluster.num_nodes == 3


def test_cards_of_given_nodes():
    assert cards_of_nodes(np.array([0, 1, 0, 1, 1, 1]), 2).tolist() == [0, 2, 1, 2, 3, 3]
    assert cards_of_nodes(np.array([0, 0, 1]), 1).tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="2 network cards cannot be shared evenly by the 3 ranks of node 1"):
        cards_of_nodes(np.array([0, 0, 1, 1, 1]), 2)


def test_default_is_one_node():
    cluster = Cluster(num_ranks=4)
    assert cluster.node_of_rank.tolist() == [0] * 4
    assert cluster.card_of_rank.tolist() == [0] * 4
    assert cluster.links is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": 8, "ranks_per_node": 4, "cards_per_node": 3}, "cards_per_node that fit: 1, 2, 4"),
    ],
)
def test_errors(fields, said):
    with pytest.raises(ValueError, match=said):
        Cluster(**fields)


def test_yaml(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "num_ranks: 16\nranks_per_node: 8\ncards_per_node: 4\n"
        "links: {intra_node_bytes_per_s: 160e9, inter_node_bytes_per_s: 8e9}\n"
    )
    links = Links(intra_node_bytes_per_s=160e9, inter_node_bytes_per_s=8e9)
    assert Cluster.from_yaml(file) == Cluster(num_ranks=16, ranks_per_node=8, cards_per_node=4, links=links)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_rank: 4", "num_ranks"),
        ("num_ranks: 4\nspeed: 3", "speed"),
        ("num_ranks: many", "num_ranks"),
        ("[1, 2", "not YAML"),
        ("num_ranks: 4\nlinks: {intra_node_bytes_per_s: 0, inter_node_bytes_per_s: 1}", "intra_node_bytes_per_s is 0"),
        ("", "top level"),
    ],
)
def test_yaml_errors_are_one_line_and_name_the_file(tmp_path, text, said):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        Cluster.from_yaml(file)
    assert said in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_yaml(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        Cluster.from_yaml(tmp_path / "none.yaml")
