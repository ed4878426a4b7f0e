"""``--hotspa-pool auto`` and ``--hotspa-assignment batch``: what a profile and the data's lengths say, before start.

Arguments are checked before there are process groups. So a profile that is missing is measured by child processes, one
for each rank, which leave nothing behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from hotspa_plugin.cost import ModelSizes, Profile, read_profile
from hotspa_plugin.data.indexed_dataset import IndexedDatasetSource
from hotspa_plugin.integrations.megatron.process import prepare_planned_memory
from hotspa_plugin.search import AUTO, BatchAssigner, LengthSource, StepModel, assigner_for, choose_pool, draw_from
from hotspa_plugin.strategy import StrategyPool

DEFAULT_PROFILE = "hotspa-profile.json"
NUM_DRAWN = 1 << 16
_ANY_VOCAB = 1  # until the tokenizer is built nobody knows better


def choose(args: argparse.Namespace) -> tuple[dict[str, int], BatchAssigner | None]:
    """Writes the pool that ``auto`` stands for, and its home, into ``args``.

    Returns the tokens of each strategy's micro-batches (none: as many as its bound), and what assigns batches (None:
    the pool's bounds). ValueError naming the flag.
    """
    auto = args.hotspa_pool == AUTO
    assignment = args.hotspa_assignment or ("batch" if auto else "bounds")
    if not auto and assignment == "bounds":
        for flag in ("profile", "lengths", "memory_limit_gb"):
            if getattr(args, f"hotspa_{flag}") is not None:
                raise ValueError(
                    f"--hotspa-{flag.replace('_', '-')} is for planning: give --hotspa-pool auto or "
                    "--hotspa-assignment batch, or leave it out"
                )
        return {}, None
    if auto and args.hotspa_home is not None:
        raise ValueError(f"--hotspa-home {args.hotspa_home}: --hotspa-pool auto chooses its home, leave it out")
    prepare_planned_memory()
    profile = _profile(args).with_distributed_optimizer(args.use_distributed_optimizer)
    limit = None if args.hotspa_memory_limit_gb is None else round(args.hotspa_memory_limit_gb * 1e9)
    packing = args.hotspa_packing
    if not auto:
        pool = StrategyPool.parse(args.hotspa_pool, home=args.hotspa_home)
        own = assigner_for(profile, pool, num_ranks=args.world_size, memory_limit_bytes=limit, packing=packing)
        return {}, own
    lengths = np.minimum(_lengths(args), args.seq_length)
    chosen = choose_pool(
        StepModel(profile, num_ranks=args.world_size, memory_limit_bytes=limit),
        draw_from(lengths, num_sequences=args.global_batch_size),
        longest_tokens=args.seq_length,
        per_batch=assignment == "batch",
        packing=packing,
    )
    args.hotspa_pool, args.hotspa_home = str(chosen.pool), str(chosen.pool.home)
    args.sequence_parallel = True  # as profiled
    if args.rank == 0:
        print(f" > hotspa: --hotspa-pool '{chosen.pool}' --hotspa-home {chosen.pool.home}: {chosen.why}", flush=True)
    return chosen.micro_batch_tokens, chosen.assigner if assignment == "batch" else None


def sizes_of(args: argparse.Namespace, vocab_size: int) -> ModelSizes:
    """The script's model as profiles know it."""
    learned = args.position_embedding_type == "learned_absolute"
    return ModelSizes(
        name="the script's model",
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size or _default_ffn(args),
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        vocab_size=vocab_size,
        gated_mlp=bool(args.swiglu),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        num_learned_positions=(args.max_position_embeddings or args.seq_length) if learned else 0,
        biases=bool(args.add_bias_linear),
        qk_norm=bool(getattr(args, "qk_layernorm", False)),
        dtype="bfloat16" if args.bf16 else "float32",
    )


def _default_ffn(args: argparse.Namespace) -> int:
    # as Megatron's own validation fills it in
    return int((4 * args.hidden_size * 2 / 3) / 64) * 64 if args.swiglu else 4 * args.hidden_size


def _profile(args: argparse.Namespace) -> Profile:
    place = Path(args.hotspa_profile or DEFAULT_PROFILE)
    if not place.exists():
        _measure(args, place)
    profile = read_profile(place)
    profile.check_model(sizes_of(args, profile.model.vocab_size))
    profile.check_ranks(args.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)))
    return profile


def _measure(args: argparse.Namespace, place: Path) -> None:
    """Runs ``hotspa profile`` on all ranks at once, each in a child of its own rank's process."""
    import yaml

    if args.rank == 0:
        print(f" > hotspa: measuring a profile first, once: it is kept in {place}", flush=True)
    vocab_size = getattr(args, "padded_vocab_size", None) or args.vocab_size or _ANY_VOCAB
    sizes = sizes_of(args, vocab_size)
    model = {
        "num_layers": sizes.num_layers,
        "hidden_size": sizes.hidden_size,
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "head_dim": sizes.head_dim,
        "ffn_hidden_size": sizes.ffn_hidden_size,
        "vocab_size": sizes.vocab_size,
        "positions": "learned" if sizes.num_learned_positions else "rope",
        "norm": "rmsnorm" if args.normalization == "RMSNorm" else "layernorm",
        "activation": "swiglu" if sizes.gated_mlp else "gelu",
        "linear_bias": sizes.biases,
        "qk_layernorm": sizes.qk_norm,
        "tied_embeddings": sizes.tied_embeddings,
    }
    if sizes.num_learned_positions:
        model["max_positions"] = sizes.num_learned_positions
    # A store of its own: torchrun's would mix the children's keys with those of this process.
    port = int(os.environ["MASTER_PORT"]) + 1
    environment = {**os.environ, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"model": model, "run": {"dtype": "bf16" if args.bf16 else "fp32"}}, file)
        file.flush()
        command = [
            sys.executable, "-m", "hotspa_plugin", "profile", "--model", file.name, "--out", str(place),
            "--longest", str(max(256, args.seq_length)),
        ]  # fmt: skip
        child = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"--hotspa-pool auto: measuring a profile failed ({last}); make one with hotspa profile first")


def _lengths(args: argparse.Namespace) -> np.ndarray:
    """Tokens of the sequences to come, before any is cut."""
    if args.hotspa_lengths is not None:
        return LengthSource.open(args.hotspa_lengths).draw(NUM_DRAWN, seed=args.seed)
    if args.mock_data:
        return LengthSource.open(args.hotspa_mock_lengths or "wikipedia").draw(NUM_DRAWN, seed=args.seed)
    if args.hotspa_sample_unit == "document":
        from megatron.training.utils import get_blend_and_blend_per_split

        blend, per_split = get_blend_and_blend_per_split(args)
        prefixes = (blend or (per_split or [None])[0] or [None])[0]
        if prefixes:
            # token ids are checked when training reads them
            return np.concatenate([IndexedDatasetSource(p, vocab_size=2**31 - 1).lengths for p in prefixes])
    raise ValueError(
        "--hotspa-pool auto must know the lengths of the script's own samples: give --hotspa-lengths, such as "
        "wikipedia, a file with one length a line, or a JSON histogram"
    )
