"""Fine-tunes a small Hugging Face LLaMA on conversations of very different length, with DeepSpeed.

The same script trains with and without hot switching: the configuration decides.

    torchrun --nproc-per-node 4 finetune.py --deepspeed --deepspeed_config ds_config_hotspa.json
    torchrun --nproc-per-node 4 finetune.py --deepspeed --deepspeed_config ds_config.json
    deepspeed --num_gpus 4 finetune.py --deepspeed --deepspeed_config ds_config_hotspa.json

On a machine without GPUs set DS_ACCELERATOR=cpu. The conversations are made from Python's standard library:
somebody asks what a function does and is answered with its documentation, or asks to see its source.
"""

import argparse
import importlib
import inspect
import time

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import hotspa_plugin.deepspeed  # noqa: F401  honours the "hotspa" block; without one nothing changes

MODULES = (
    "argparse",
    "ast",
    "collections",
    "dataclasses",
    "difflib",
    "inspect",
    "json",
    "logging",
    "pathlib",
    "statistics",
)
END = 256  # one token more than there are bytes
IGNORED = -100


def make_conversations(longest: int) -> list[dict[str, list[int]]]:
    """Question and answer as bytes; the loss is taken on the answer only."""
    conversations = []
    for module_name in MODULES:
        for name, member in inspect.getmembers(importlib.import_module(module_name)):
            own = getattr(member, "__module__", None) == module_name
            if name.startswith("_") or not own or not (inspect.isfunction(member) or inspect.isclass(member)):
                continue
            for question, read in (("What does {} do?", inspect.getdoc), ("Show me {}.", inspect.getsource)):
                try:
                    answer = read(member)
                except OSError:
                    continue
                if answer:
                    asked = list(f"{question.format(name)}\n".encode())
                    tokens = [*asked, *answer.encode(), END][:longest]
                    conversations.append({"input_ids": tokens, "labels": [IGNORED] * len(asked) + tokens[len(asked) :]})
    return conversations


def train_step(engine, batch: list[dict[str, list[int]]]) -> float:
    """One optimizer step over a global batch that every rank holds; returns its mean loss per target token."""
    if hasattr(engine, "train_batch"):  # hot switching takes the whole batch
        return engine.train_batch(batch).item()
    # DeepSpeed alone: each rank trains its share, conversation by conversation.
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = batch[rank::world_size]
    num_targets = sum(label != IGNORED for item in batch for label in item["labels"][1:])
    total = torch.zeros((), device=engine.device)
    for item in share:
        tokens = torch.tensor(item["input_ids"], device=engine.device)
        targets = torch.tensor(item["labels"][1:], device=engine.device)
        logits = engine(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
        # DeepSpeed averages over ranks; dividing by all targets makes every token count the same.
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
        loss = loss * world_size / num_targets
        engine.set_gradient_accumulation_boundary(item is share[-1])
        engine.backward(loss, scale_wrt_gas=False)
        total += loss.detach()
    engine.step()
    dist.all_reduce(total)
    return total.item() / world_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="conversations per step")
    parser.add_argument("--longest", type=int, default=4096, help="conversations are cut to this many tokens")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--local_rank", type=int, default=-1)  # the deepspeed launcher passes it
    args = deepspeed.add_config_arguments(parser).parse_args()
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to compile
        torch.set_num_threads(1)
    deepspeed.init_distributed()

    conversations = make_conversations(args.longest)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=260, hidden_size=args.hidden, intermediate_size=3 * args.hidden, num_hidden_layers=args.layers,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=args.longest,
        )
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if dist.get_rank() == 0:
        lengths = sorted(len(item["input_ids"]) for item in conversations)
        print(
            f"{len(lengths)} conversations of {lengths[0]} to {lengths[-1]} tokens, half of them below "
            f"{lengths[len(lengths) // 2]}",
            flush=True,
        )
    order = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        chosen = torch.randperm(len(conversations), generator=order)[: args.batch].tolist()
        started_s = time.perf_counter()
        loss = train_step(engine, [conversations[index] for index in chosen])
        if dist.get_rank() == 0:
            num_tokens = sum(len(conversations[index]["input_ids"]) for index in chosen)
            print(
                f"step {step}: loss {loss:.6f}, {num_tokens / (time.perf_counter() - started_s):.0f} tokens/s",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
