"""Models that cannot be switched, and what rank processes do with them."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.deepspeed.work import make_model, prepare


def start(*, model: str, config: dict[str, Any]) -> None:
    """Only builds an engine, over a model that may not fit."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    hotspa.initialize(model=_questionable_model(model), config=config)


def _questionable_model(name: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if name == "gpt2":
        sizes = dict(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=256)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    if name == "linear":
        return torch.nn.Linear(2, 2)
    if name == "class":
        return torch.nn.Linear
    if name == "none":
        return None
    if name == "t5":
        return AutoConfig.for_model("t5", vocab_size=96, d_model=32)
    if name == "mixtral":
        return make_model("mixtral", num_local_experts=2)
    if name == "huge":  # only described: 1.5e12 parameters
        sizes = dict(hidden_size=65536, intermediate_size=262144, num_hidden_layers=20, num_attention_heads=64)
        return AutoConfig.for_model("llama", vocab_size=128000, num_key_value_heads=8, **sizes)
    if name == "bert":
        sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
        from transformers import BertForSequenceClassification

        return BertForSequenceClassification(AutoConfig.for_model("bert", **sizes))
    if name == "dynamic-rope":
        return make_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    if name == "mamba":
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model("mamba", vocab_size=96, hidden_size=32, num_hidden_layers=1)
        )
    if name == "half":
        return make_model("llama").bfloat16()
    if name == "odd-heads":
        return make_model("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    if name == "few-kv-heads":
        return make_model("llama", num_key_value_heads=2)
    model = make_model("llama")
    if name == "unknown-style":
        model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.mlp.both": "packed_colwise"}
    if name == "frozen":
        model.requires_grad_(False)
    if name == "changed":
        model.model.layers[0].mlp.up_proj = torch.nn.Sequential(model.model.layers[0].mlp.up_proj)
    if name == "buffer":
        model.register_buffer("counts", torch.zeros(3))
    return model
