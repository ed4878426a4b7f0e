"""What rank processes do for the DeepSpeed tests."""

from __future__ import annotations

import copy
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

os.environ.setdefault("DS_ACCELERATOR", "cpu")

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
             num_key_value_heads=4, max_position_embeddings=4096)  # fmt: skip


def prepare() -> None:
    """Leaves out the compiled shared-memory op, which would take most of a minute."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_model(family: str, seed: int = 0, **changes: Any):
    """A tiny random model of a transformers family, the same wherever it is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, **changes}
    if family == "qwen3":
        sizes.setdefault("head_dim", 8)
    config = AutoConfig.for_model(family, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases that are all 1 or 0 hide errors
    return model


def make_batch(lengths: list[int], seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[np.ndarray]:
    generator = np.random.RandomState(seed)
    return [generator.randint(0, vocab_size, length) for length in lengths]


def ds_config(*, pool: str | None, stage: int = 0, **changes: Any) -> dict[str, Any]:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**9,
    }
    if pool is not None:
        config["hotspa"] = {"pool": pool, **changes.pop("block", {})}
    config.update(changes)
    return config


def train(
    *, family: str, config: dict[str, Any], batches: list[list[int]], sizes: dict | None = None
) -> dict[str, Any]:
    """Trains one step per batch on every rank; rank 0 returns losses, norms and whole weights."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    engine, *_ = hotspa.initialize(model=make_model(family, **(sizes or {})), config=config)
    engine.loop.switcher.poison = True
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        losses.append(engine.train_batch(make_batch(lengths, step)).item())
        norms.append(float(engine.get_global_grad_norm() or "nan"))
    weights, differing = engine.gather_parameters()
    return {"losses": losses, "norms": norms, "weights": weights, "differing": differing}


def train_reference(*, family: str, batches: list[list[int]], sizes: dict | None = None) -> dict[str, Any]:
    """The same in one process: transformers' own attention, torch's AdamW and clipping, sequence by sequence."""
    model = make_model(family, **(sizes or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        optimizer.zero_grad()
        num_targets = sum(length - 1 for length in lengths)
        total = 0.0
        for tokens in map(torch.from_numpy, make_batch(lengths, step)):
            if len(tokens) == 1:
                continue
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:], reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "norms": norms, "weights": {n: p.data for n, p in model.named_parameters()}}


def train_megatron(*, config: dict[str, Any], batches: list[list[int]], preset: str) -> dict[str, Any]:
    """Like ``train`` for a Megatron-core preset; the initial whole weights are returned as well."""
    prepare()
    from hotspa_plugin.integrations.megatron import process

    process.prepare_process()
    import hotspa_plugin.deepspeed as hotspa
    from hotspa_plugin.integrations.megatron.gpt import build_gpt

    spec = megatron_spec(preset, config["hotspa"]["pool"])

    def build(strategy, initialize):
        return build_gpt(spec, strategy, torch.float32, initialize=initialize)

    engine, *_ = hotspa.initialize(model=build, config=config)
    engine.loop.switcher.poison = True
    initial, _ = engine.gather_parameters()
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        losses.append(engine.train_batch(make_batch(lengths, step)).item())
        norms.append(float(engine.get_global_grad_norm() or "nan"))
    weights, differing = engine.gather_parameters()
    return {"losses": losses, "norms": norms, "initial": initial, "weights": weights, "differing": differing}


def train_megatron_reference(*, preset: str, pool: str, batches: list[list[int]], initial: dict) -> dict[str, Any]:
    """The same in one process: Megatron's own layers, sequence by sequence, torch's AdamW and clipping."""
    from hotspa_plugin.integrations.megatron import process

    process.prepare_process(on_cpu=True)
    from hotspa_plugin.data import Sample
    from hotspa_plugin.integrations.megatron.reference import Reference

    reference = Reference(megatron_spec(preset, pool))
    reference.load(initial)
    parameters = reference.parameters
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.1)
    losses, norms = [], []
    for step, lengths in enumerate(batches):
        samples = [Sample.from_tokens(tokens) for tokens in make_batch(lengths, step)]
        loss_sum, num_targets, gradients = reference.gradients(samples)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum / num_targets)
    weights = reference.gather({name: p.data for name, p in parameters.items()})
    return {"losses": losses, "norms": norms, "weights": weights}


def megatron_spec(preset: str, pool: str):
    from hotspa_plugin.config import ModelConfig
    from hotspa_plugin.integrations.megatron.gpt import GPTSpec
    from hotspa_plugin.strategy import StrategyPool

    model = ModelConfig.model_validate({"preset": preset, "num_layers": 2, "hidden_size": 32})
    return GPTSpec.from_config(
        model, padded_vocab_size=SIZES["vocab_size"], max_positions=max(StrategyPool.parse(pool).bounds_tokens)
    )


def train_deepspeed(
    *, family: str, config: dict[str, Any], batches: list[list[int]], import_plugin: bool, sizes: dict | None = None
) -> dict[str, Any]:
    """DeepSpeed itself, data parallel over all ranks, one padded micro-batch of each rank's share per step.

    With ``import_plugin`` our module is imported before, which without a block must change nothing.
    """
    prepare()
    import deepspeed

    if import_plugin:
        import hotspa_plugin.deepspeed as hotspa

        hotspa.install()
    elif hasattr(deepspeed.initialize, "_hotspa_original"):
        import hotspa_plugin.deepspeed as hotspa

        hotspa.uninstall()
    model = make_model(family, **(sizes or {}))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step, lengths in enumerate(batches):
        mine = make_batch(lengths, step)[rank::world_size]
        num_targets = sum(length - 1 for length in lengths)
        loss = 0.0
        for tokens in mine:
            ids = torch.from_numpy(tokens)[None]
            logits = engine(input_ids=ids, use_cache=False).logits[0]
            part = torch.nn.functional.cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="sum")
            part = part * (world_size / num_targets)
            engine.set_gradient_accumulation_boundary(tokens is mine[-1])
            engine.backward(part, scale_wrt_gas=False)
            loss += part.item()
        engine.step()
        losses.append(loss)
    weights = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
    return {"losses": losses, "weights": weights}


def resume(
    *, family: str, config: dict[str, Any], other: dict[str, Any], batches: list[list[int]], folder: str
) -> dict:
    """Trains unbroken, and once more with a checkpoint halfway that a run under ``other`` resumes."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    half = len(batches) // 2
    engine, *_ = hotspa.initialize(model=make_model(family), config=copy.deepcopy(config))
    unbroken = []
    for step, lengths in enumerate(batches):
        if step == half:
            engine.save_checkpoint(folder, tag="half", client_state={"mine": 7})
        unbroken.append(engine.train_batch(make_batch(lengths, step)).item())
    expected, _ = engine.gather_parameters()
    engine, *_ = hotspa.initialize(model=make_model(family, seed=99), config=copy.deepcopy(other))
    path, state = engine.load_checkpoint(folder)
    assert path is not None and state["mine"] == 7 and "hotspa" not in state, (path, state)
    assert engine.global_steps == half
    resumed = [engine.train_batch(make_batch(batches[s], s)).item() for s in range(half, len(batches))]
    actual, _ = engine.gather_parameters()
    return {
        "unbroken": unbroken[half:],
        "resumed": resumed,
        "lr": engine.get_lr(),
        "expected": expected,
        "actual": actual,
    }


def save(*, family: str, config: dict[str, Any], folder: str) -> None:
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    engine, *_ = hotspa.initialize(model=make_model(family), config=config)
    engine.train_batch(make_batch([5, 70], 0))
    engine.save_checkpoint(folder)


def load(*, family: str, config: dict[str, Any], folder: str) -> None:
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    hotspa.initialize(model=make_model(family), config=config)[0].load_checkpoint(folder)


def start(*, model: str, config: dict[str, Any]) -> None:
    """Only builds an engine, over a model that may not fit."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    if model == "gpt2":
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = dict(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=256)
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    elif model == "llama-2kv":
        built = make_model("llama", num_key_value_heads=2)
    elif model == "linear":
        built = torch.nn.Linear(2, 2)
    elif model == "half":
        built = make_model("llama").bfloat16()
    else:
        built = make_model("llama")
        for parameter in built.parameters():
            parameter.requires_grad = model != "frozen"
    hotspa.initialize(model=built, config=config)


def exercise(*, folder: str) -> list[str]:
    """Returns what is not as it should be; collective."""
    prepare()
    import csv
    import glob

    import deepspeed
    import hotspa_plugin.deepspeed as hotspa

    hotspa.install()
    found: list[str] = []
    pool = "tp1:64 tp2:128 tp4:256"

    def check(what: str, good: bool) -> None:
        if not good:
            found.append(what)

    def refuses(what: str, call, *wanted: str, error: type = ValueError) -> None:
        try:
            call()
        except error as raised:
            check(f"{what}: {raised}", all(part in str(raised) for part in wanted))
        else:
            found.append(f"{what}: accepted")

    # An optimizer, a scheduler and frozen parameters of the user's own, and a monitor.
    model = make_model("llama")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if "embed" in name or "layers.0" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen
    decay = [p for n, p in model.named_parameters() if p.dim() > 1]
    no_decay = [p for n, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config = ds_config(pool=pool, stage=1, csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"})
    del config["optimizer"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine, _, loader, own_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    check("deepspeed.initialize gives our engine", isinstance(engine, hotspa.HotSwitchEngine))
    check("no loader", loader is None)
    before, _ = engine.gather_parameters()
    batch = make_batch([60, 100, 200, 3], 0)

    # A refused batch changes nothing, and names the sample.
    for what, bad, *wanted in [
        ("overlong", [[1, 2], list(range(90)) * 3], "sample 1", "270 tokens", "256"),
        ("empty", [[1, 2], []], "sample 1", "no tokens"),
        ("token", [[1, 2], [3, 96]], "sample 1", "token 96 at position 1", "vocabulary of 96"),
        ("labels", [{"input_ids": [1, 2, 3], "labels": [1]}], "sample 0", "1 labels for 3 tokens"),
        ("gap", [{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}], "sample 0", "pad at the end"),
        ("nothing to train", [[1], [2]], "no target token"),
        ("shape", torch.zeros(3, dtype=torch.long), "shape (3,)"),
    ]:
        refuses(what, lambda bad=bad: engine.train_batch(bad), *wanted)
    refuses("ranks differ", lambda: engine.train_batch([[1, 2 + dist.get_rank()]]), "per_rank", error=RuntimeError)
    refuses("step alone", engine.step, "no gradient")
    check("no step was taken", engine.global_steps == 0 and engine.global_samples == 0)
    again, _ = engine.gather_parameters()
    check("parameters unchanged", before is None or all(torch.equal(before[n], again[n]) for n in before))

    # forward, backward and step are train_batch.
    evaluated = engine.eval_batch(batch).item()
    loss = engine(batch)
    refuses("a second batch", lambda: engine(batch), "engine.step()")
    refuses("a loss of one's own", lambda: engine.backward(loss * 2), "unchanged")
    engine.backward(loss)
    engine.step()
    check("evaluation gives the training loss", abs(evaluated - loss.item()) < 1e-5)
    check("one step", engine.global_steps == 1)
    check("scheduler stepped", engine.get_lr() == [5e-3, 5e-3] and own_scheduler is scheduler)
    after, _ = engine.gather_parameters()
    if after is not None:
        check("frozen stay", all(torch.equal(after[n], v) for n, v in frozen.items()))
        check("others move", all(not torch.equal(after[n], before[n]) for n in after if n not in frozen))
    check("eval mode trains nothing", engine.eval()(batch).item() < loss.item() and engine.global_steps == 1)
    engine.train()

    # Labels and padding as Hugging Face collators give them are the same batch.
    ids = torch.zeros(2, 10, dtype=torch.long)
    ids[0], ids[1, :6] = torch.arange(10), torch.arange(6)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = torch.where(mask.bool(), ids, -100)
    one = engine.eval_batch({"input_ids": ids, "attention_mask": mask, "labels": labels}).item()
    two = engine.eval_batch([range(10), range(6)]).item()
    check(f"collated batch {one} {two}", abs(one - two) < 1e-6)
    labels[0, :5] = -100
    engine.eval_batch({"input_ids": ids, "attention_mask": mask, "labels": labels})
    check("ignored labels", engine.last_result.num_target_tokens == 5 + 5)

    # Hugging Face folder with the trained weights.
    engine.save_pretrained(folder + "/exported")
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        loaded = dict(AutoModelForCausalLM.from_pretrained(folder + "/exported").named_parameters())
        check("exported", all(torch.equal(loaded[n], v) for n, v in after.items()))
        rows = {path.split("/")[-1]: list(csv.reader(open(path))) for path in glob.glob(folder + "/job/*.csv")}
        wanted = ["Train_Samples_train_loss.csv", "Train_Samples_grad_norm.csv", "Train_Samples_lr.csv"]
        check(f"monitored {sorted(rows)}", all(name in rows for name in wanted))
        written = float(rows["Train_Samples_train_loss.csv"][1][1])
        check("monitored loss", abs(written - loss.item()) < 1e-5)

    # Each rank's own part of the batch, a dataset, and a position in it that a checkpoint keeps.
    config = ds_config(pool=pool, stage=2, train_batch_size=4, block={"batch": "per_rank"})
    engine, *_ = hotspa.initialize(model=make_model("llama"), config=config)
    parts = engine.train_batch(batch[dist.get_rank() : dist.get_rank() + 1]).item()
    check("parts of all ranks", engine.last_result.assignment.num_sequences == 4)
    config = ds_config(pool=pool, stage=2, train_batch_size=4)
    data = [{"input_ids": tokens} for tokens in make_batch([3 + 7 * i for i in range(10)], 5)]
    engine, _, _, _ = hotspa.initialize(model=make_model("llama"), config=config)
    check("as one batch", abs(engine.train_batch(batch).item() - parts) < 1e-6)
    engine, _, loader, _ = hotspa.initialize(model=make_model("llama").config, config=config, training_data=data)
    check("loader", len(loader) == 3 and all(len(items) == 4 for items in loader))
    engine.train_batch()
    engine.train_batch(data_iter=iter(loader))
    position = loader.sampler.num_consumed
    engine.save_checkpoint(folder + "/checkpoint")
    engine.train_batch()
    engine.load_checkpoint(folder + "/checkpoint")
    check("data position", loader.sampler.num_consumed == position)
    groups = len(dist.distributed_c10d._world.pg_map)
    for seed in range(3):
        engine.train_batch(make_batch([60, 100, 200, 3], seed))
    check("no new groups", len(dist.distributed_c10d._world.pg_map) == groups)
    refuses("mpu", lambda: hotspa.initialize(model=model, config=config, mpu=object()), "mpu is given")
    refuses("collate", lambda: hotspa.initialize(model=model, config=config, collate_fn=list), "collate_fn")
    foreign = torch.optim.SGD(make_model("llama").parameters(), lr=0.1)
    refuses("foreign", lambda: hotspa.initialize(model=make_model("llama"), config=config, optimizer=foreign),
            "does not belong to the model")  # fmt: skip
    return found
