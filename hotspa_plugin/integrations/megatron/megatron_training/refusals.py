"""What hot switching refuses in a script's flags, and how a refusal ends the start."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hotspa_plugin.runtime.rank_failure import EXIT_USER_ERROR
from hotspa_plugin.strategy import StrategyPool

# How long the other ranks wait for the launcher to end them, so that rank 0's message comes out first.
_OTHERS_WAIT_S = 10.0


@contextlib.contextmanager
def user_errors(rank: int, about: str = "") -> Iterator[None]:
    """Turns a ValueError inside into one line from rank 0 and exit code 2 on every rank.

    ``about`` is the flag that the message is about, where it may not say so itself. Only for checks that fail on all
    ranks alike.
    """
    try:
        yield
    except ValueError as error:
        if rank == 0:
            flag = f"{about}: " if about and "--hotspa-" not in str(error) else ""
            print(f"error: {flag}{error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_OTHERS_WAIT_S)
        sys.exit(EXIT_USER_ERROR)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A flag of Megatron's that hot switching cannot honour. ``given`` tells whether a value asks for it."""

    argument: str
    flag: str
    instead: str
    given: Callable[[Any], bool] = bool


def _more_than_one(value: Any) -> bool:
    return value is not None and value > 1


_EVEN = "strategies of a pool split the layers evenly: leave it out"
_GRAPHS = "buckets differ in shape from step to step: leave it out"
REFUSALS = (
    Refusal(argument="context_parallel_size", flag="--context-parallel-size", given=_more_than_one,
            instead="give long sequences a strategy with more tp and pp in --hotspa-pool"),
    Refusal(argument="hybrid_context_parallel", flag="--hybrid-context-parallel",
            instead="--hotspa-pool sorts sequences by length itself"),
    Refusal(argument="expert_model_parallel_size", flag="--expert-model-parallel-size", given=_more_than_one,
            instead="only dense models can be hot-switched"),
    Refusal(argument="num_experts", flag="--num-experts", instead="only dense models can be hot-switched"),
    Refusal(argument="mtp_num_layers", flag="--mtp-num-layers", instead="leave multi-token prediction out"),
    Refusal(argument="hybrid_layer_pattern", flag="--hybrid-layer-pattern", instead="only GPT models can be switched"),
    Refusal(argument="heterogeneous_layers_config_path", flag="--heterogeneous-layers-config-path",
            instead="all layers must be alike"),
    Refusal(argument="use_megatron_fsdp", flag="--use-megatron-fsdp", instead="use --use-distributed-optimizer"),
    Refusal(argument="use_torch_fsdp2", flag="--use-torch-fsdp2", instead="use --use-distributed-optimizer"),
    Refusal(argument="num_distributed_optimizer_instances", flag="--num-distributed-optimizer-instances",
            given=_more_than_one, instead="use one instance"),
    Refusal(argument="overlap_param_gather_with_optimizer_step", flag="--overlap-param-gather-with-optimizer-step",
            instead="use --overlap-param-gather"),
    Refusal(argument="enable_cuda_graph", flag="--enable-cuda-graph", instead=_GRAPHS),
    Refusal(argument="external_cuda_graph", flag="--external-cuda-graph", instead=_GRAPHS),
    Refusal(argument="cuda_graph_impl", flag="--cuda-graph-impl", instead=_GRAPHS,
            given=lambda value: value not in (None, "none")),
    Refusal(argument="optimizer_cuda_graph", flag="--optimizer-cuda-graph", instead="leave it out"),
    Refusal(argument="fp8", flag="--fp8-format", instead="train in bf16"),
    Refusal(argument="fp4", flag="--fp4-format", instead="train in bf16"),
    Refusal(argument="tp_comm_overlap", flag="--tp-comm-overlap",
            instead="its buffers have one sequence length, buckets have many: leave it out"),
    Refusal(argument="delay_wgrad_compute", flag="--delay-wgrad-compute", instead="leave it out"),
    Refusal(argument="pipeline_model_parallel_layout", flag="--pipeline-model-parallel-layout", instead=_EVEN),
    Refusal(argument="decoder_first_pipeline_num_layers", flag="--decoder-first-pipeline-num-layers", instead=_EVEN),
    Refusal(argument="decoder_last_pipeline_num_layers", flag="--decoder-last-pipeline-num-layers", instead=_EVEN),
    Refusal(argument="account_for_embedding_in_pipeline_split", flag="--account-for-embedding-in-pipeline-split",
            instead=_EVEN),
    Refusal(argument="account_for_loss_in_pipeline_split", flag="--account-for-loss-in-pipeline-split", instead=_EVEN),
    Refusal(argument="perform_rl_step", flag="--perform-rl-step", instead="hot switching is for pretraining and SFT"),
    Refusal(argument="yaml_cfg", flag="--yaml-cfg", instead="give arguments on the command line"),
    Refusal(argument="full_validation", flag="--full-validation", instead="use --eval-iters"),
    Refusal(argument="multiple_validation_sets", flag="--multiple-validation-sets", instead="use one validation set"),
    Refusal(argument="iterations_to_skip", flag="--iterations-to-skip", instead="resume from a checkpoint before them"),
    Refusal(argument="dataloader_type", flag="--dataloader-type", given=lambda value: value not in (None, "single"),
            instead="samples are read in order, as with --dataloader-type single"),
    Refusal(argument="ddp_param_name_patterns_for_fp32_local_accumulation",
            flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
            instead="use --accumulate-allreduce-grads-in-fp32, which keeps all gradients in fp32"),
    Refusal(argument="reset_attention_mask", flag="--reset-attention-mask",
            instead="each document is a sequence of its own already"),
    Refusal(argument="reset_position_ids", flag="--reset-position-ids",
            instead="each document is a sequence of its own already"),
)  # fmt: skip

_NEED_POOL = ("home", "switch_memory_mb", "report_dir", "timeout_s", "mock_lengths", "check_every",
              "assignment", "profile", "lengths", "memory_limit_gb")  # fmt: skip


def refuse_without_pool(args: argparse.Namespace) -> None:
    """Raises ValueError where flags of hot switching are given without a pool."""
    for name in _NEED_POOL:
        if getattr(args, f"hotspa_{name}", None):
            flag = "--hotspa-" + name.replace("_", "-")
            raise ValueError(
                f"{flag} means nothing without --hotspa-pool: give a pool such as 'tp1:4096 tp4:32768', "
                f"or leave {flag} out"
            )


def refuse_unsupported(args: argparse.Namespace, pool: StrategyPool) -> None:
    """Raises ValueError for flags that hot switching cannot honour, before Megatron validates them."""
    for refusal in REFUSALS:
        value = getattr(args, refusal.argument, None)
        if refusal.given(value):
            shown = "" if value is True else f" {value}"
            raise ValueError(
                f"{refusal.flag}{shown} does not go together with --hotspa-pool: {refusal.instead}, or train "
                "without --hotspa-pool"
            )
    for flag, value, least in (
        ("switch-memory-mb", args.hotspa_switch_memory_mb, 1),
        ("timeout-s", args.hotspa_timeout_s, 1),
        ("check-every", args.hotspa_check_every, 0),
    ):
        if value is not None and value < least:
            raise ValueError(f"--hotspa-{flag} {value}: must be at least {least}")
    if args.hotspa_mock_lengths is not None and not args.mock_data:
        raise ValueError("--hotspa-mock-lengths is for random data: add --mock-data, or leave it out")
    bound = pool.bounds_tokens[-1]
    if args.hotspa_sample_unit == "sample" and args.hotspa_overlong == "error" and args.seq_length > bound:
        raise ValueError(
            f"samples of --seq-length {args.seq_length} can be longer than the last bound of --hotspa-pool, "
            f"{bound}: raise that bound, or say with --hotspa-overlong what to do with them"
        )
