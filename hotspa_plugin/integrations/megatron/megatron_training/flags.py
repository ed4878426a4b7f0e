"""The command-line flags of hot switching, and the pool that they and the script's own flags describe."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from hotspa_plugin.strategy import ModelShape, ParallelStrategy, PoolEntry, StrategyPool


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the argument group ``hotspa``."""
    group = parser.add_argument_group(
        title="hotspa", description="train under several parallel strategies in each step; off without --hotspa-pool"
    )
    group.add_argument(
        "--hotspa-pool", default=None, metavar="SPEC",
        help="strategies with the longest sequence, in tokens, that each takes, such as 'tp1:4096 tp2pp2:16384 "
        "tp4pp2:32768' (tp, pp, vpp; rc recomputes activations, rcs selectively). tp > 1 uses sequence parallelism "
        "where the script does. auto: planned from a profile and the lengths of the data up to --seq-length",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-assignment", choices=["bounds", "batch"], default=None,
        help="who trains a sequence: bounds, the pool's; batch, chosen for each batch from its lengths and the "
        "profile; default: batch with --hotspa-pool auto, else bounds",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-profile", default=None, metavar="FILE",
        help="what hotspa profile wrote for this model and these ranks, for auto and batch; measured at start where it "
        "is missing; default: hotspa-profile.json",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-lengths", default=None, metavar="SPEC|FILE",
        help="lengths to plan auto for, as hotspa plan takes them; default: those of the documents in --data-path",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-memory-limit-gb", type=float, default=None, metavar="GB",
        help="memory of a rank to plan with, in 10^9 bytes; default: the device's",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-home", default=None, metavar="STRATEGY",
        help="strategy of the pool that owns the optimizer and checkpoints; default: the one that the script's "
        "--tensor-model-parallel-size and --pipeline-model-parallel-size describe",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-packing", choices=["padded", "packed"], default="padded",
        help="padded: sequences of about one length in a micro-batch, through the script's own get_batch; packed: "
        "several in one row without padding, through the script's own loss function",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-sample-unit", choices=["document", "sample"], default="document",
        help="document: each document of the indexed data set is one sequence; sample: each sample of the script's "
        "own data set provider is one, as long as its true tokens",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-overlong", choices=["error", "truncate", "split", "drop"], default="error",
        help="what to do with sequences over the last bound",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-switch-policy", default="balanced", metavar="POLICY",
        help="how senders are chosen: balanced, new_greedy, greedy, round_robin, multi_node_round_robin or fcfs",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-switch-memory-mb", type=int, default=None, metavar="MB",
        help="extra memory that one switch may take on a rank; larger ones run in rounds",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-overlap-switch", choices=["none", "flush", "both"], default="none",
        help="what moves while another bucket computes: flush (the gradients of the bucket before, which needs a "
        "second slab of gradients), both (the parameters of the next bucket as well), none",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-bucket-order", choices=["auto", "ascending", "descending"], default="auto",
        help="order of the buckets of the other strategies by length bound; home's is always last. auto: ascending, or "
        "the smallest switch first where the other switches are hidden (--hotspa-overlap-switch both)",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-timeout-s", type=float, default=None, metavar="SECONDS",
        help="longest wait of a collective; default: --distributed-timeout-minutes",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-report-dir", default=None, metavar="DIR",
        help="folder for records of every step, for 'hotspa report DIR'",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-check-every", type=int, default=0, metavar="STEPS",
        help="every so many steps check switches, flushes and all copies of parameters for silent damage; 0: never",
    )  # fmt: skip
    group.add_argument(
        "--hotspa-mock-lengths", default=None, metavar="SPEC",
        help="with --mock-data: lengths of random sequences, wikipedia, uniform:LOW-HIGH, lognormal:MEDIAN,SIGMA or "
        "file:PATH",
    )  # fmt: skip
    return parser


def repair_help(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escapes help texts that argparse cannot format (Megatron 0.19.2 has one), so that --help works."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            if action.help:
                formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = action.help.replace("%", "%%")
    return parser


def read_pool(args: argparse.Namespace) -> StrategyPool:
    """The pool of ``--hotspa-pool`` with its home, sequence parallelism as the script has it; not checked yet.

    Raises ValueError that names the flag.
    """
    pool = StrategyPool.parse(args.hotspa_pool)
    strategies = [_with_script_sp(entry.strategy, args) for entry in pool.entries]
    if args.hotspa_home is not None:
        home = _with_script_sp(ParallelStrategy.parse(args.hotspa_home), args)
        if home not in strategies:
            raise ValueError(
                f"--hotspa-home {args.hotspa_home} is not in --hotspa-pool {args.hotspa_pool!r}: add it with a bound, "
                f"or name one of {', '.join(str(entry.strategy) for entry in pool.entries)}"
            )
    else:
        home = _home_of_script(args, strategies)
    entries = [
        PoolEntry(strategy=s, bound_tokens=e.bound_tokens) for s, e in zip(strategies, pool.entries, strict=True)
    ]
    return StrategyPool(entries=tuple(entries), home=home)


def _with_script_sp(strategy: ParallelStrategy, args: argparse.Namespace) -> ParallelStrategy:
    return strategy if args.sequence_parallel or strategy.tp == 1 else dataclasses.replace(strategy, sp=False)


def _home_of_script(args: argparse.Namespace, strategies: list[ParallelStrategy]) -> ParallelStrategy:
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    vpp = _script_vpp(args)
    fitting = [s for s in strategies if (s.tp, s.pp) == (tp, pp) and (vpp is None or s.vpp == vpp)]
    # Of two that differ in recomputation, the plain one is what the script's flags say.
    fitting.sort(key=lambda s: s.recompute != "none")
    if not fitting:
        own = f"tp{tp}" + (f"pp{pp}" if pp > 1 else "") + (f"vpp{vpp}" if (vpp or 1) > 1 else "")
        raise ValueError(
            f"the script's own strategy, {own} (--tensor-model-parallel-size {tp} --pipeline-model-parallel-size "
            f"{pp}), "
            f"is not in --hotspa-pool {args.hotspa_pool!r}: add {own} with a bound to the pool, or name the home "
            f"strategy with --hotspa-home, one of {', '.join(map(str, strategies))}"
        )
    return fitting[0]


def _script_vpp(args: argparse.Namespace) -> int | None:
    """Model chunks per rank that the script's flags ask for; None where a layout string decides."""
    if args.pipeline_model_parallel_size == 1:
        return 1
    if getattr(args, "num_virtual_stages_per_pipeline_rank", None) is not None:
        return args.num_virtual_stages_per_pipeline_rank
    per_stage = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    if per_stage is not None:
        return args.num_layers // args.pipeline_model_parallel_size // per_stage
    return None if getattr(args, "pipeline_model_parallel_layout", None) is not None else 1


def model_shape(args: argparse.Namespace, vocab_size: int) -> ModelShape:
    """The sizes that strategies are checked against, from validated arguments."""
    learned = args.position_embedding_type == "learned_absolute"
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        head_dim=args.kv_channels,
        vocab_size=vocab_size,
        gated=bool(args.swiglu),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        learned_positions=learned,
        max_positions=args.max_position_embeddings if learned else None,
    )


def strategy_flags(strategy: ParallelStrategy, args: argparse.Namespace) -> dict[str, Any]:
    """The script's arguments, as it would parse them, that make Megatron run ``strategy``."""
    flags: dict[str, Any] = {
        "tensor_model_parallel_size": strategy.tp,
        "pipeline_model_parallel_size": strategy.pp,
        "sequence_parallel": strategy.sp,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": strategy.vpp if strategy.vpp > 1 else None,
        "expert_tensor_parallel_size": None,
        "tensor_parallel_num_weight_shards": None,
    }
    if strategy.recompute == "full":
        flags |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif strategy.recompute == "selective":
        flags |= {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None}
    return {name: value for name, value in flags.items() if hasattr(args, name)}


def check_vocabulary(args: argparse.Namespace, pool: StrategyPool) -> None:
    """Raises ValueError where home's padded vocabulary cannot be split by some strategy, naming what would do."""
    sizes = sorted({strategy.tp for strategy in pool.strategies})
    if all(args.padded_vocab_size % tp == 0 for tp in sizes):
        return
    wanted = math.lcm(args.make_vocab_size_divisible_by * pool.home.tp, *sizes) // pool.home.tp
    raise ValueError(
        f"the padded vocabulary of {args.padded_vocab_size} cannot be split by every tp of --hotspa-pool "
        f"({', '.join(map(str, sizes))}): set --make-vocab-size-divisible-by {wanted}"
    )
