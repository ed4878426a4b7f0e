"""What rank processes do for the tests of the engine's methods, checkpoints, monitors and refusals."""

from __future__ import annotations

import copy
import csv
import glob
import json
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.integrations.deepspeed.work import ds_config, make_batch, make_model, prepare

POOL = "tp1:64 tp2:128 tp4:256"


class Findings(list):
    """What is not as it should be."""

    def check(self, what: str, good: bool) -> None:
        if not good:
            self.append(what)

    def refuses(self, what: str, call, *wanted: str, error: type = ValueError) -> None:
        """``call`` raises ``error`` with one line that holds all ``wanted`` parts."""
        try:
            call()
        except error as raised:
            said = str(raised)
            self.check(f"{what}: {said}", all(part in said for part in wanted) and "\n" not in said)
        except Exception as raised:
            self.append(f"{what}: {type(raised).__name__}: {raised}")
        else:
            self.append(f"{what}: accepted")


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


def load(*, family: str, config: dict[str, Any], folder: str, sizes: dict | None = None, **options: Any) -> None:
    """Loads what ``save`` wrote; where that is refused nothing may have changed."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    engine = hotspa.initialize(model=make_model(family, **(sizes or {})), config=config)[0]
    before = _everything(engine)
    try:
        engine.load_checkpoint(folder, **options)
    except ValueError:
        assert engine.global_steps == 0 and all(map(torch.equal, before, _everything(engine)))
        raise
    assert engine.global_steps == (0 if options.get("load_module_only") else 1)


def _everything(engine) -> list[torch.Tensor | None]:
    """What a refused batch must leave alone: weights, optimizer state, random state."""
    states = [value for state in engine.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [torch.get_rng_state(), *(value.clone() for value in [*engine.weights.parameters.values(), *states])]


def refuse_batches() -> Findings:
    """Batches that cannot be trained: one line each, and nothing has changed, so that the next step is as ever."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    found = Findings()
    config = ds_config(pool=POOL, stage=1, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}})
    batch = make_batch([60, 100, 200, 3], 0)
    losses = []
    for disturbed in (False, True):
        engine, *_ = hotspa.initialize(model=make_model("llama"), config=copy.deepcopy(config))
        losses.append([engine.train_batch(batch).item()])
        if disturbed:
            before, last, rate = _everything(engine), engine.last_result, engine.get_lr()
            _refuse(found, engine)
            found.check("no step was taken", engine.global_steps == 1 and engine.global_samples == 8)
            found.check("learning rate", engine.get_lr() == rate and engine.last_result is last)
            found.check("state", all(map(torch.equal, before, _everything(engine))))
        losses[-1].append(engine.train_batch(make_batch([9, 70, 250], 1)).item())
    found.check(f"the step after {losses}", losses[0] == losses[1])

    # Weights that give no number.
    model = make_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    engine, *_ = hotspa.initialize(model=model, config=config)
    before = _everything(engine)
    found.refuses("not a number", lambda: engine.train_batch(batch), "loss is nan at step 0", "no step was taken")
    found.check("nothing stepped", engine.global_steps == 0 and all(map(torch.equal, before, _everything(engine))))
    return found


def _refuse(found: Findings, engine) -> None:
    for what, bad, *wanted in [
        ("overlong", [[1, 2], list(range(90)) * 3], "sample 1", "270 tokens", "256", "hotspa.overlong"),
        ("empty sample", [[1, 2], []], "sample 1", "no tokens"),
        ("empty batch", [], "batch: is empty"),
        ("nothing", {"input_ids": torch.zeros(0, 5, dtype=torch.long)}, "batch: is empty"),
        ("token", [[1, 2], [3, 96]], "sample 1", "token 96 at position 1", "vocabulary of 96"),
        ("negative token", [[1, -2]], "sample 0", "token -2 at position 1"),
        ("label", [{"input_ids": [1, 2], "labels": [1, 99]}], "sample 0", "label 99"),
        ("labels", [{"input_ids": [1, 2, 3], "labels": [1]}], "sample 0", "1 labels for 3 tokens"),
        ("gap", [{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1]}], "sample 0", "pad at the end"),
        ("mask", [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 2]}], "sample 0", "other numbers than 0 and 1"),
        ("one token each", [[1], [2]], "batch: has no target token"),
        ("ignored", [{"input_ids": [1, 2], "labels": [-100, -100]}], "batch: has no target token"),
        ("shape", torch.zeros(3, dtype=torch.long), "shape (3,)"),
        ("three dims", torch.zeros(2, 3, 4, dtype=torch.long), "shape (2, 3, 4)"),
        ("floats", [[0.5, 1.5]], "sample 0", "whole numbers"),
        ("float tensor", torch.zeros(2, 3), "sample 0", "whole numbers"),
        ("text", "hello", "batch: a str"),
        ("texts", ["hello"], "sample 0", "whole numbers"),
        ("number", 5, "batch: a int is no batch"),
        ("none inside", [None], "sample 0", "whole numbers"),
        ("nested", [[[1, 2]]], "sample 0", "whole numbers"),
        ("ragged", [[1, [2, 3]]], "sample 0", "whole numbers"),
        ("other keys", {"tokens": [[1, 2]]}, "holds tokens, but no input_ids"),
        ("other item keys", [{"text": "x"}], "sample 0", "no input_ids"),
        ("rows", {"input_ids": [[1, 2]], "labels": [[1, 2], [1, 2]]}, "2 rows of labels for 1 of input_ids"),
    ]:
        found.refuses(what, lambda bad=bad: engine.train_batch(bad), *wanted)
    differing = [[1, 2 + dist.get_rank()]]
    found.refuses("ranks differ", lambda: engine.train_batch(differing), "per_rank", error=RuntimeError)
    found.refuses("no data", engine.train_batch, "give a batch")
    found.refuses("step alone", engine.step, "no gradient")


def exercise(*, folder: str) -> Findings:
    """An optimizer, a scheduler and frozen parameters of the user's own, and the engine's methods."""
    prepare()
    import deepspeed

    import hotspa_plugin.deepspeed as hotspa

    hotspa.install()
    found = Findings()
    check, refuses = found.check, found.refuses
    model = make_model("llama")
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if "embed" in name or "layers.0" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen
    decay = [p for n, p in model.named_parameters() if p.dim() > 1]
    no_decay = [p for n, p in model.named_parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    config = ds_config(pool=POOL, stage=1)
    del config["optimizer"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    engine, _, loader, own_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    check("deepspeed.initialize gives our engine", isinstance(engine, hotspa.HotSwitchEngine))
    check("no loader", loader is None)
    before, _ = engine.gather_parameters()
    batch = make_batch([60, 100, 200, 3], 0)

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

    # A batch that is evaluated before the step is taken leaves the gradient, and its scale, alone.
    engine(batch)
    finished, _ = engine.gather_gradients()
    engine.eval_batch(make_batch([5, 90], 1))
    again, _ = engine.gather_gradients()
    engine.step()
    after, _ = engine.gather_parameters()
    if finished is not None:
        check("evaluation keeps the gradient", all(torch.equal(again[n], v) for n, v in finished.items()))
        norm = torch.stack([gradient.double().norm() for gradient in finished.values()]).norm().item()
        stepped = float(engine.get_global_grad_norm())
        check(f"evaluation keeps the step's scale: {stepped}, {norm}", abs(stepped / norm - 1) < 1e-5)

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
    _refuse_checkpoints(found, engine, folder)
    refuses("DeepSpeed's export", lambda: engine.save_16bit_model(folder), "save_pretrained")
    return found


def feed(*, folder: str) -> Findings:
    """Each rank's own part of the batch, overlong samples, a dataset, and a position in it that a checkpoint keeps."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    found = Findings()
    check, refuses = found.check, found.refuses
    batch = make_batch([60, 100, 200, 3], 0)
    config = ds_config(pool=POOL, stage=2, train_batch_size=4, block={"batch": "per_rank"})
    engine, *_ = hotspa.initialize(model=make_model("llama"), config=config)
    rank = dist.get_rank()
    masked = [{"input_ids": tokens, "labels": [-100] * 2 + list(tokens)[2:]} for tokens in batch]
    uneven = [masked[:3], [], masked[3:], []]  # rank 1 and 3 hold nothing, yet train
    parts = [engine.train_batch(batch[rank : rank + 1]).item(), engine.train_batch(uneven[rank]).item()]
    parts.append(engine.eval_batch(uneven[rank]).item())
    check("parts of all ranks", engine.last_result.assignment.num_sequences == 4)
    wrong = [masked[:1], [[5, -1]], [], []]
    refuses("a bad part", lambda: engine.train_batch(wrong[rank]), "rank 1: sample 0: token -1 at position 1")
    refuses("no part", lambda: engine.train_batch([]), "is empty")
    config = ds_config(pool=POOL, stage=2, train_batch_size=4)
    whole, *_ = hotspa.initialize(model=make_model("llama"), config=config)
    together = [whole.train_batch(batch).item(), whole.train_batch(masked).item(), whole.eval_batch(masked).item()]
    check(f"as one batch: {parts}, {together}", parts == together)
    data = [{"input_ids": tokens} for tokens in make_batch([3 + 7 * i for i in range(10)], 5)]
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
    cut = [tokens[start : start + 256] for tokens in make_batch([600, 40], 3) for start in range(0, len(tokens), 256)]
    engine, *_ = hotspa.initialize(
        model=make_model("llama"), config=ds_config(pool=POOL, block={"overlong": "split"}, train_batch_size=4)
    )
    fresh, *_ = hotspa.initialize(model=make_model("llama"), config=ds_config(pool=POOL, train_batch_size=4))
    check("split", engine.train_batch(make_batch([600, 40], 3)).item() == fresh.train_batch(cut).item())
    check("pieces", engine.last_result.assignment.num_sequences == 4 and engine.num_overlong == 1)
    model = make_model("llama")
    refuses("mpu", lambda: hotspa.initialize(model=model, config=config, mpu=object()), "mpu is given")
    refuses("collate", lambda: hotspa.initialize(model=model, config=config, collate_fn=list), "collate_fn")
    foreign = torch.optim.SGD(make_model("llama").parameters(), lr=0.1)
    refuses("no items", lambda: hotspa.initialize(model=model, config=config, training_data=[]), "data: is empty")
    without = {key: value for key, value in config.items() if key != "optimizer"}
    refuses("no optimizer", lambda: hotspa.initialize(model=model, config=without), "there is no optimizer")
    refuses("foreign", lambda: hotspa.initialize(model=make_model("llama"), config=config, optimizer=foreign),
            "does not belong to the model")  # fmt: skip
    return found


def monitors(*, folder: str, kinds: list[str]) -> Findings:
    """Trains one step with the monitors of ``kinds``, and reads the loss back from what each has written."""
    prepare()
    import hotspa_plugin.deepspeed as hotspa

    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true")
    settings = {
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": folder, "job_name": "tb"},
        "wandb": {"enabled": True, "project": "test"},
    }
    config = ds_config(pool=POOL, stage=1, **{kind: settings[kind] for kind in kinds})
    engine, *_ = hotspa.initialize(model=make_model("llama"), config=config)
    loss = engine.train_batch(make_batch([60, 100, 200, 3], 0)).item()
    found = Findings()
    if dist.get_rank() != 0:
        return found
    wanted = ["Train/Samples/train_loss", "Train/Samples/grad_norm", "Train/Samples/lr"]
    wanted += [f"Train/hotspa/{strategy}/sequences" for strategy in ("tp1", "tp2", "tp4")]
    read: dict[str, dict[str, float]] = {}
    if "csv_monitor" in kinds:
        files = glob.glob(f"{folder}/csv/*.csv")
        read["csv"] = {os.path.basename(path)[:-4].replace("_", "/"): _last_value(path) for path in files}
        wanted_csv = {name.replace("_", "/"): name for name in wanted}
        read["csv"] = {wanted_csv.get(name, name): value for name, value in read["csv"].items()}
    if "tensorboard" in kinds:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(f"{folder}/tb")
        events.Reload()
        read["tensorboard"] = {name: events.Scalars(name)[0].value for name in events.Tags()["scalars"]}
    if "wandb" in kinds:
        import wandb

        wandb.finish()
        (path,) = glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")
        read["wandb"] = _read_wandb(path)
    for kind, values in read.items():
        found.check(f"{kind} has {sorted(values)}", set(wanted) <= set(values))
        found.check(f"{kind}: loss {values.get(wanted[0])} is {loss}", abs(values.get(wanted[0], 0.0) - loss) < 1e-5)
        found.check(f"{kind}: sequences", [values.get(name) for name in wanted[3:]] == [2, 1, 1])
    return found


def _last_value(path: str) -> float:
    with open(path, encoding="utf-8") as file:
        return float(list(csv.reader(file))[-1][1])


def _read_wandb(path: str) -> dict[str, float]:
    """The values that an offline run has written."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store, values = DataStore(), {}
    store.open_for_scan(path)
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        for item in record.history.item:
            values[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    return values


def _refuse_checkpoints(found: Findings, engine, folder: str) -> None:
    """What neither saves nor loads: one line each, and the folder stays as it was."""
    refuses = found.refuses
    refuses("client state", lambda: engine.save_checkpoint(folder + "/c", client_state=[1]), "must be a mapping")
    refuses("own key", lambda: engine.save_checkpoint(folder + "/c", client_state={"hotspa": 1}), "without the key")
    refuses("no folder", lambda: engine.save_checkpoint(None), "expected a folder, got None")
    file = folder + "/exported/config.json"
    refuses("a file", lambda: engine.save_checkpoint(file), "expected a folder", "config.json")
    found.check("nothing was written", not os.path.exists(folder + "/c"))
    refuses("nowhere", lambda: engine.load_checkpoint(None), "expected a folder, got None")
    refuses("tag without any", lambda: engine.load_checkpoint(folder, tag="x"), "no checkpoint x: it has none")
    engine.save_checkpoint(folder + "/c", tag="one")
    refuses("another tag", lambda: engine.load_checkpoint(folder + "/c", tag="x"), "no checkpoint x: it has one")
