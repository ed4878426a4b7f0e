"""Which Hugging Face models, under which strategies, can be switched exactly; others are refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hotspa_plugin.integrations.deepspeed.tensor_parallel import TensorParallelPlan
from hotspa_plugin.strategy import ParallelStrategy

# transformers' model types whose gradients, tensor by tensor, the tests compare with one process under tp 1, 2 and 4.
EXACT_FAMILIES = (
    "arcee", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gpt_neox", "granite", "helium", "internlm3", "llama",
    "ministral", "ministral3", "mistral", "olmo", "phi", "qwen2", "qwen3", "starcoder2",
)  # fmt: skip


def check_model(model: PreTrainedModel) -> None:
    """Raises ValueError where ``model`` cannot be switched exactly, whatever the strategy."""
    name = type(model).__name__
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(f"model: {name} is no causal language model of transformers (AutoModelForCausalLM)")
    if not model._supports_attention_backend:
        raise ValueError(
            f"model: {name} does not let its attention be replaced (AttentionInterface), so documents of one row "
            "could see each other"
        )
    layer_types = set(getattr(model.config, "layer_types", None) or ())
    if mixers := sorted(layer_types - {"full_attention", "sliding_attention"}):
        raise ValueError(f"model: {name} has layers of type {mixers[0]}, in which documents of one row see each other")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"model: {name} carries a state along the row, so documents of one row would see each other")
    rope = getattr(model.config, "rope_parameters", None) or {}
    for settings in [rope, *(value for value in rope.values() if isinstance(value, Mapping))]:
        if settings.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"model: rope_type {settings['rope_type']!r} depends on the longest sequence beside, which differs "
                "from micro-batch to micro-batch: use default, linear, llama3 or yarn"
            )
    persistent = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if persistent:
        raise ValueError(
            f"model: persistent buffer {min(persistent)} is no parameter, and hot switching does not know whether to "
            "move, add or derive it"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("model: no parameter is trained (requires_grad is False everywhere)")


def check_family(model: PreTrainedModel) -> None:
    """Raises ValueError where ``model`` is of a family for which no test shows that its gradients are exact."""
    family = model.config.model_type
    if family not in EXACT_FAMILIES:
        raise ValueError(
            f"model: nothing shows that {type(model).__name__} ({family}) trains exactly when it is switched; families "
            f"that do: {', '.join(EXACT_FAMILIES)}"
        )


def check_strategy(model: PreTrainedModel, strategy: ParallelStrategy) -> None:
    """Raises ValueError where ``model`` cannot run under ``strategy``."""
    if strategy.pp > 1:
        raise ValueError(f"strategy {strategy}: Hugging Face models have no pipeline here, so pp must be 1")
    if strategy.recompute == "selective":
        raise ValueError(
            f"strategy {strategy}: Hugging Face models recompute all (rc) or nothing, not selectively (rcs)"
        )
    if strategy.tp > 1:
        TensorParallelPlan.of(model)
        _check_sizes(model, strategy.tp)


def _check_sizes(model: PreTrainedModel, tp: int) -> None:
    """Raises ValueError where ``tp`` does not split the model's heads and MLP evenly."""
    config = model.config
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
    }
    fits = [n for n in range(1, sizes["num_key_value_heads"] + 1) if all(size % n == 0 for size in sizes.values())]
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(
                f"strategy tp{tp}: tp {tp} does not divide {name} {size} of {type(model).__name__}; "
                f"tp sizes that fit: {', '.join(map(str, fits))}"
            )
