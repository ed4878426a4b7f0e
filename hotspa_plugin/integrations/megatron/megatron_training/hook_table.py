"""Which functions of Megatron hot switching replaces, and why: readable without Megatron."""

from __future__ import annotations

import dataclasses

_ARGUMENTS = "megatron.training.arguments"
_TRAINING = "megatron.training.training"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookEntry:
    """One replaced function. Not ``everywhere``: only its owner's binding, not those of modules that imported it."""

    module: str
    name: str
    why: str
    everywhere: bool = True

    @property
    def symbol(self) -> str:
        return f"{self.module}.{self.name}"


HOOK_TABLE = (
    HookEntry(module=_ARGUMENTS, name="add_megatron_arguments",
              why="adds the flags of hot switching to the parser and to --help"),
    HookEntry(module=_ARGUMENTS, name="validate_args",
              why="reads and checks the pool, and derives the arguments of each strategy"),
    HookEntry(module="megatron.core.parallel_state", name="initialize_model_parallel",
              why="makes the process groups of all strategies beside home's"),
    HookEntry(module=_TRAINING, name="setup_model_and_optimizer",
              why="builds the other strategies' modules once home's are built and loaded"),
    HookEntry(module=_TRAINING, name="build_train_valid_test_data_iterators",
              why="lets every rank read data, since each trains under some strategy"),
    HookEntry(module=_TRAINING, name="build_pretraining_data_loader",
              why="yields global batches of single sequences instead of home's micro-batches"),
    # Megatron's core asks for its own schedule under the same name.
    HookEntry(module=_TRAINING, name="get_forward_backward_func", everywhere=False,
              why="puts the hot switch where the training loop runs its schedule"),
    HookEntry(module=_TRAINING, name="train_step", why="starts the clock of a step for its records"),
    HookEntry(module=_TRAINING, name="training_log",
              why="adds a line about the buckets, and their figures to TensorBoard and Weights & Biases"),
    HookEntry(module=_TRAINING, name="train", why="closes the records when training ends, also by a signal"),
)  # fmt: skip
