"""The hooks of the hook table, with their wrappers: installing and removing them."""

from __future__ import annotations

import torch

from hotspa_plugin.compatibility import check_start
from hotspa_plugin.integrations.megatron.megatron_training import adaptor
from hotspa_plugin.integrations.megatron.megatron_training.hook_table import HOOK_TABLE
from hotspa_plugin.integrations.megatron.megatron_training.hooks import Hook, HookSet, megatron_release
from hotspa_plugin.integrations.megatron.megatron_training.signatures import SIGNATURES

_WRAPPERS = {
    "add_megatron_arguments": adaptor.wrap_add_megatron_arguments,
    "validate_args": adaptor.wrap_validate_args,
    "initialize_model_parallel": adaptor.wrap_initialize_model_parallel,
    "setup_model_and_optimizer": adaptor.wrap_setup_model_and_optimizer,
    "build_train_valid_test_data_iterators": adaptor.wrap_build_iterators,
    "build_pretraining_data_loader": adaptor.wrap_build_loader,
    "get_forward_backward_func": adaptor.wrap_get_forward_backward_func,
    "train_step": adaptor.wrap_train_step,
    "training_log": adaptor.wrap_training_log,
    "train": adaptor.wrap_train,
}

_hooks = HookSet(
    [
        Hook(
            module=entry.module,
            name=entry.name,
            why=entry.why,
            everywhere=entry.everywhere,
            wrap=_WRAPPERS[entry.name],
            signatures={release: known[entry.name] for release, known in SIGNATURES.items() if entry.name in known},
        )
        for entry in HOOK_TABLE
    ]
)


def inventory() -> tuple[Hook, ...]:
    """All hooks, in the order in which a start meets them."""
    return _hooks.hooks


def install() -> None:
    """Puts all hooks in place; calling it again changes nothing.

    Warns of versions of torch and Megatron that were not tested; raises RuntimeError for those that cannot work.
    """
    import megatron.training.training  # noqa: F401  (the hooks find its aliases)
    from megatron.core import package_info

    check_start({"torch": torch.__version__, "megatron-core": package_info.__version__})
    _hooks.install(megatron_release())


def remove() -> None:
    """Puts Megatron's own functions back."""
    _hooks.remove()
