"""Every function of Megatron that hot switching replaces, and why."""

from __future__ import annotations

from hotspa_plugin.integrations.megatron.megatron_training import adaptor
from hotspa_plugin.integrations.megatron.megatron_training.hooks import Hook, HookSet, megatron_release
from hotspa_plugin.integrations.megatron.megatron_training.signatures import SIGNATURES

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"

_HOOKS = (
    (_ARGUMENTS, "add_megatron_arguments", adaptor.wrap_add_megatron_arguments,
     "adds the flags of hot switching to the parser and to --help"),
    (_ARGUMENTS, "validate_args", adaptor.wrap_validate_args,
     "reads and checks the pool, and derives the arguments of each strategy"),
    ("megatron.core.parallel_state", "initialize_model_parallel", adaptor.wrap_initialize_model_parallel,
     "makes the process groups of all strategies beside home's"),
    (_TRAINING, "setup_model_and_optimizer", adaptor.wrap_setup_model_and_optimizer,
     "builds the other strategies' modules once home's are built and loaded"),
    (_TRAINING, "build_train_valid_test_data_iterators", adaptor.wrap_build_iterators,
     "lets every rank read data, since each trains under some strategy"),
    (_TRAINING, "build_pretraining_data_loader", adaptor.wrap_build_loader,
     "yields global batches of single sequences instead of home's micro-batches"),
    (_TRAINING, "get_forward_backward_func", adaptor.wrap_get_forward_backward_func,
     "puts the hot switch where the training loop runs its schedule"),
    (_TRAINING, "train_step", adaptor.wrap_train_step,
     "starts the clock of a step for its records"),
    (_TRAINING, "training_log", adaptor.wrap_training_log,
     "adds a line about the buckets, and their figures to TensorBoard and Weights & Biases"),
    (_TRAINING, "train", adaptor.wrap_train,
     "closes the records when training ends, also by a signal"),
)  # fmt: skip
# Megatron's core asks for its own schedule under the same name.
_ONLY_THERE = {"get_forward_backward_func"}

_hooks = HookSet(
    [
        Hook(module=module, name=name, why=why, wrap=wrap, everywhere=name not in _ONLY_THERE,
             signatures={release: known[name] for release, known in SIGNATURES.items() if name in known})
        for module, name, wrap, why in _HOOKS
    ]
)  # fmt: skip


def inventory() -> tuple[Hook, ...]:
    """All hooks, in the order in which a start meets them."""
    return _hooks.hooks


def install() -> None:
    """Puts all hooks in place; calling it again changes nothing."""
    import megatron.training.training  # noqa: F401  (the hooks find its aliases)

    _hooks.install(megatron_release())


def remove() -> None:
    """Puts Megatron's own functions back."""
    _hooks.remove()
