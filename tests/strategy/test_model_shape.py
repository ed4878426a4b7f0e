import pytest

from hotspa_plugin.strategy import ModelShape

SIZES = dict(num_layers=2, hidden_size=64, ffn_hidden_size=96, num_attention_heads=8, vocab_size=256)


def test_defaults_follow_from_the_sizes():
    model = ModelShape(**SIZES)
    assert (model.num_query_groups, model.head_dim, model.query_size, model.key_value_size) == (8, 8, 64, 64)
    grouped = ModelShape(**SIZES, num_query_groups=2, head_dim=16)
    assert (grouped.query_size, grouped.key_value_size) == (128, 32)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        (
            {"num_query_groups": 3},
            "num_query_groups 3 does not divide the 8 attention heads; sizes that fit: 1, 2, 4, 8",
        ),
        ({"hidden_size": 60}, "hidden_size 60 is not a multiple of the 8"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"learned_positions": True}, "needs max_positions"),
        ({"max_positions": 64}, "without learned_positions"),
    ],
)
def test_errors_name_the_size(changes, said):
    with pytest.raises(ValueError, match=said):
        ModelShape(**(SIZES | changes))
