"""Whole steps over gloo: cases that fuzzing found, and what it reports of ranks that fail."""

import pytest

from hotspa_plugin.fuzz.campaign import Campaign, draw_cases
from hotspa_plugin.fuzz.case import FuzzCase
from hotspa_plugin.fuzz.outcome import Status
from hotspa_plugin.fuzz.runners import StepRunner

pytestmark = [pytest.mark.gloo, pytest.mark.newest]

# Found by fuzzing, and kept: JSON as the failure printed it.
FOUND = {
    # Gradients that all but cancel: fp32 itself is no closer to fp64 than hot switching is.
    "bias of a key norm": '{"kind":"step","num_ranks":2,"pool":["tp1:60","pp2:95","tp2rc:97","pp2rc:152"],"home":"pp2",'
    '"model":{"num_layers":4,"hidden_size":32,"num_attention_heads":2,"num_query_groups":2,"head_dim":16,'
    '"ffn_hidden_size":2,"vocab_size":250,"make_vocab_size_divisible_by":64,"positions":"rope","norm":"layernorm",'
    '"activation":"swiglu","linear_bias":false,"qk_layernorm":true,"tied_embeddings":false},'
    '"distributed_optimizer":true,"policy":"new_greedy","switch_memory_bytes":200000,"ranks_per_node":1,'
    '"lengths":[[3]],"seed":58490}',
}


def test_what_fuzzing_found():
    with StepRunner(timeout_s=120) as runner:
        for name, text in FOUND.items():
            found = runner.run(FuzzCase.model_validate_json(text))
            assert not found.is_defect, (name, found)


@pytest.mark.slow
def test_a_campaign_of_steps():
    campaign = Campaign(cases=draw_cases(12, 5, (2, 4), ("step",)), timeout_s=120, shrink_s=0)
    campaign.run()
    assert not campaign.failures, [failure.outcome for failure in campaign.failures]
    assert sum(one.status is Status.VERIFIED for one in campaign.outcomes) >= 6
