"""The engine that users hold: DeepSpeed's own, with a ``train_batch`` that hot switches."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from hotspa_plugin.integrations.deepspeed.batches import GlobalBatchLoader, as_global_batch
from hotspa_plugin.integrations.deepspeed.checkpoint import CLIENT_STATE, SavedRun, check_checkpoint
from hotspa_plugin.integrations.deepspeed.config_block import HotspaBlock
from hotspa_plugin.integrations.deepspeed.home import HomeReduction, HomeWeights
from hotspa_plugin.integrations.deepspeed.model_family import ModelFamily
from hotspa_plugin.runtime.bucket_loop import BatchResult, BucketLoop
from hotspa_plugin.runtime.global_view import gather_global, load_global


class HotSwitchEngine:
    """A DeepSpeed engine over home's parameters that trains under every strategy of a pool.

    Whatever is not defined here is the DeepSpeed engine's own: ``global_steps``, ``get_lr()``, ``lr_scheduler``,
    ``optimizer``, ``monitor`` and so on. Made by ``initialize``, by every rank of the world together; its methods
    are collective.
    """

    def __init__(
        self,
        *,
        engine: DeepSpeedEngine,
        block: HotspaBlock,
        loop: BucketLoop,
        weights: HomeWeights,
        reduction: HomeReduction,
        family: ModelFamily,
        loader: GlobalBatchLoader | None,
        device: torch.device,
    ) -> None:
        self.deepspeed_engine = engine
        self.block, self.pool, self.loop, self.weights = block, family.pool, loop, weights
        self.training_dataloader = loader
        self.last_result: BatchResult | None = None
        self.num_overlong = 0  # sequences over the last bound so far, treated as hotspa.overlong says
        self._reduction = reduction
        self._family = family
        self._device = device
        # The loss that was returned, and its batch: batches may be evaluated before the step is taken.
        self._pending: tuple[torch.Tensor, BatchResult] | None = None
        self._own_iterator: Iterator[Any] | None = None
        self._training = True

    def __getattr__(self, name: str) -> Any:
        if name == "deepspeed_engine":  # not set yet, or being unpickled
            raise AttributeError(name)
        return getattr(self.deepspeed_engine, name)

    # ------------------------------------------------------------ training

    def train_batch(self, batch: Any = None, *, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step over a global batch; returns its mean loss per target token, a scalar.

        The batch is ``batch``, or the next of ``data_iter``, or of the data loader made from ``training_data``;
        ``batches.to_samples`` says what it may be. Raises ValueError, with nothing changed, for a batch that cannot
        be trained.
        """
        loss = self._accumulate(self._batch_from(batch, data_iter))
        self.step()
        return loss

    def eval_batch(self, batch: Any = None, *, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """The mean loss per target token of a global batch, without training on it."""
        batch = self._batch_from(batch, data_iter)
        with torch.no_grad():
            return self._run(batch, forward_only=True)

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of a global batch; in training mode its gradient is computed at once, for ``step`` to use.

        ``loss = engine(batch); engine.backward(loss); engine.step()`` is ``engine.train_batch(batch)``.
        """
        return self._accumulate(batch) if self._training else self.eval_batch(batch)

    forward = __call__

    def backward(self, loss: torch.Tensor, **_: Any) -> torch.Tensor:
        """Accepts the loss that the engine itself returned; its gradient is there already."""
        if self._pending is None or loss is not self._pending[0]:
            raise ValueError(
                "backward: hot switching computes gradients batch by batch, bucket by bucket, so only the loss "
                "that engine(batch) returned can be passed on, unchanged"
            )
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Hands the accumulated gradient to DeepSpeed, which reduces, clips and takes the step."""
        if self._pending is None:
            raise ValueError("step: there is no gradient; call engine(batch) or engine.train_batch(batch) first")
        (loss, result), self._pending = self._pending, None
        engine = self.deepspeed_engine
        with self.loop.recorder.span("optimizer", step=engine.global_steps, part="step"):
            self._reduction.run(self.weights.gradients)
            # DeepSpeed averages over home's replicas, whose gradients are parts of one sum.
            factor = engine.dp_world_size / result.num_target_tokens
            engine.backward(engine(loss.detach().clone(), self.weights.gradients, factor))
            engine.step(lr_kwargs=lr_kwargs)
            self.weights.refresh()
        self._report(result)

    def train(self, mode: bool = True) -> HotSwitchEngine:
        self._training = mode
        self.deepspeed_engine.train(mode)
        return self

    def eval(self) -> HotSwitchEngine:
        return self.train(False)

    def _batch_from(self, batch: Any, data_iter: Iterator[Any] | None) -> Any:
        if batch is not None:
            return batch
        if data_iter is None:
            if self.training_dataloader is None:
                raise ValueError("train_batch: give a batch, a data_iter, or training_data to initialize")
            if self._own_iterator is None:
                self._own_iterator = self._endless(self.training_dataloader)
            data_iter = self._own_iterator
        return next(data_iter)

    @staticmethod
    def _endless(loader: GlobalBatchLoader) -> Iterator[Any]:
        while True:
            yield from loader

    def _accumulate(self, batch: Any) -> torch.Tensor:
        if self._pending is not None:
            raise ValueError(
                "the gradient of the batch before waits for engine.step(): one call takes a whole global batch, so "
                "there are no further batches to accumulate"
            )
        loss = self._run(batch, forward_only=False)
        self._pending = loss, self.last_result
        return loss

    def _run(self, batch: Any, *, forward_only: bool) -> torch.Tensor:
        step = self.deepspeed_engine.global_steps
        batch = as_global_batch(
            batch,
            step=step,
            per_rank=self.block.batch == "per_rank",
            vocab_size=self._family.vocab_size,
            bound_tokens=self.pool.bounds_tokens[-1],
            overlong=self.block.overlong,
            device=self._device,
        )
        if not forward_only:
            self.weights.zero_gradients()
        result = self.loop.run(batch, forward_only=forward_only)
        if not forward_only:
            if not result.num_target_tokens:
                raise ValueError("batch: has no target token, so there is nothing to train")
            if not math.isfinite(result.loss) or not self.weights.gradients_are_finite():
                raise ValueError(
                    f"batch: its loss is {result.loss} at step {step}, or its gradient is not finite; no step was "
                    "taken, and the weights are as before: look at the data, the weights and the learning rate"
                )
        self.last_result = result
        self.num_overlong += getattr(batch, "num_overlong", 0)
        return torch.tensor(result.loss, dtype=torch.float32, device=self._device)

    def _report(self, result: BatchResult) -> None:
        engine = self.deepspeed_engine
        if not engine.monitor.enabled or dist.get_rank() != 0:
            return
        samples = engine.global_samples
        events = [("Train/Samples/train_loss", result.loss, samples)]
        if (norm := engine.get_global_grad_norm()) is not None:
            events.append(("Train/Samples/grad_norm", float(norm), samples))
        if self.block.overlong != "error":
            events.append(("Train/hotspa/overlong_sequences", self.num_overlong, samples))
        for bucket in result.buckets:
            for what in ("sequences", "compute_s", "switch_s", "flush_s"):
                events.append((f"Train/hotspa/{bucket.strategy}/{what}", getattr(bucket, what), samples))
        engine.monitor.write_events(events)

    # ------------------------------------------------------------ checkpoints

    def save_checkpoint(self, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
                        **options: Any) -> bool:  # fmt: skip
        """DeepSpeed's checkpoint, with the pool and the position in the data beside the client state.

        Raises ValueError, with nothing written, where ``save_dir`` is no folder or ``client_state`` no mapping.
        """
        if not isinstance(save_dir, (str, os.PathLike)) or os.path.isfile(save_dir):
            raise ValueError(f"save_checkpoint: expected a folder, got {save_dir!r}, which is none")
        if not isinstance(client_state or {}, Mapping) or CLIENT_STATE in (client_state or {}):
            raise ValueError(f"save_checkpoint: client_state must be a mapping without the key {CLIENT_STATE!r}")
        state = {**(client_state or {}), CLIENT_STATE: self._state()}
        return self.deepspeed_engine.save_checkpoint(save_dir, tag=tag, client_state=state, **options)

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """Loads what ``save_checkpoint`` wrote, under the same home; the rest of the pool may have changed.

        Returns (path, client state) as DeepSpeed does. Raises ValueError for a tag that is not there, another home,
        another model, and a ZeRO stage that keeps its state elsewhere, before anything changes.
        """
        wants_optimizer = options.get("load_optimizer_states", True) and not options.get("load_module_only", False)
        check_checkpoint(load_dir, tag, run=self._run_to_save(), with_optimizer=wants_optimizer)
        path, state = self.deepspeed_engine.load_checkpoint(load_dir, tag=tag, **options)
        if path is None:
            return path, state
        state = dict(state or {})
        saved = state.pop(CLIENT_STATE, None)
        self.weights.refresh()
        self._pending = None
        if saved and saved["data"] is not None and self.training_dataloader is not None:
            self.training_dataloader.sampler.load_state_dict(saved["data"])
            self._own_iterator = None
        return path, state

    def _state(self) -> dict[str, Any]:
        data = None if self.training_dataloader is None else self.training_dataloader.sampler.state_dict()
        return {"pool": str(self.pool), "data": data, **dataclasses.asdict(self._run_to_save())}

    def _run_to_save(self) -> SavedRun:
        return SavedRun(
            home=str(self.pool.home),
            zero_stage=int(self.deepspeed_engine.zero_optimization_stage()),
            shapes={tensor.name: tuple(tensor.shape) for tensor in self._family.home_layout.tensors},
        )

    # ------------------------------------------------------------ whole tensors

    def gather_parameters(self) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
        """Whole parameters in the compute dtype on rank 0, and the names of those whose copies differ."""
        return gather_global(self._family.home_layout, dist.get_rank(), self.weights.parameters)

    def gather_gradients(self) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
        """Whole finished gradients (of the mean loss) on rank 0, and the names of those whose copies differ.

        To be called between ``engine(batch)`` and ``step``, which it does not disturb.
        """
        if self._pending is None:
            raise ValueError("gather_gradients: there is no gradient; call engine(batch) first")
        gradients = {name: gradient.clone() for name, gradient in self.weights.gradients.items()}
        self._reduction.run(gradients)
        group = self.deepspeed_engine.mpu.get_data_parallel_group()
        for gradient in gradients.values():
            dist.all_reduce(gradient, group=group)
            gradient /= self._pending[1].num_target_tokens
        return gather_global(self._family.home_layout, dist.get_rank(), gradients)

    def load_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets all parameters from whole tensors by name, given on every rank. Not for ZeRO 3."""
        if self.deepspeed_engine.zero_optimization_partition_weights():
            raise ValueError("load_parameters: ZeRO 3 holds parameters in parts; load a checkpoint, or use ZeRO 0 to 2")
        masters = {name: parameter.data for name, parameter in self.deepspeed_engine.module.named_parameters()}
        load_global(self._family.home_layout, dist.get_rank(), values, masters)
        if self.deepspeed_engine.zero_optimization():
            self.deepspeed_engine.optimizer.refresh_fp32_params()
        self.weights.refresh()

    def discard_gradient(self) -> None:
        """Forgets the gradient that waits for ``step``."""
        self._pending = None

    def check_switches(self) -> list[str]:
        """Switches to every other strategy and compares what arrived, bit for bit, with what home holds.

        Returns the names of tensors that differ, on rank 0.
        """
        home, _ = self.gather_parameters()
        wrong: dict[str, None] = {}
        switcher = self.loop.switcher
        for runner in self.loop.runners:
            if runner.label == str(self.pool.home):
                continue
            switcher.enter(runner.label)
            there, differing = gather_global(
                switcher.layout(runner.label), dist.get_rank(), self._family.parameters(runner.label)
            )
            if home is not None:
                names = [name for name in home if not torch.equal(home[name], there[name])]
                wrong.update(dict.fromkeys(f"{name} under {runner.label}" for name in [*names, *differing]))
        switcher.release()
        return list(wrong)

    def save_16bit_model(self, *_: Any, **__: Any) -> None:
        """Refused: DeepSpeed would write this rank's part of home alone."""
        raise ValueError(
            "save_16bit_model: parameters lie in shards here; use save_pretrained, or gather_parameters and torch.save"
        )

    def save_pretrained(self, save_directory: str, **options: Any) -> None:
        """Writes a Hugging Face model with the weights trained so far, in the compute dtype, from rank 0."""
        if self._family.template is None:
            raise ValueError("save_pretrained: this engine does not train a Hugging Face model; use gather_parameters")
        values, _ = self.gather_parameters()
        if values is not None:
            self._family.template.save_pretrained(save_directory, state_dict=values, **options)
        dist.barrier()
