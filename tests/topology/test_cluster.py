import numpy as np
import pytest

from hotspa_plugin.topology import Cluster, cards_of_nodes


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
