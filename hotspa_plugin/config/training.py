"""The sections beside the model, and the whole configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from hotspa_plugin.config.fields import Count, CountOrZero, Fraction, NonNegative, Positive, Section
from hotspa_plugin.config.model import ModelConfig
from hotspa_plugin.search import AUTO
from hotspa_plugin.strategy import StrategyPool

DEFAULT_POOL = "tp1:512 tp2:1024 tp2pp2:4096"


class DataConfig(Section):
    """Where sequences come from, and how many make a global batch.

    ``overlong`` (None: ``truncate`` for the standard library, else ``error``) says what becomes of a sequence
    over the pool's last bound. With ``pool: auto`` that bound is ``longest_tokens`` (None: the longest sequence of the
    data). ``assignment`` (None: ``batch`` with ``pool: auto``, else ``bounds``) says whether the pool's bounds decide
    which strategy trains a sequence, or each batch's own lengths do.
    """

    source: Literal["stdlib", "folder", "jsonl", "megatron"] = "stdlib"
    path: str | None = None
    text_key: str = "text"  # of a jsonl object
    tokenizer: str = "bytes"
    end_of_document: bool | str | None = None
    overlong: Literal["error", "truncate", "split", "drop"] | None = None
    global_batch_sequences: Count | None = None
    global_batch_tokens: Count | None = None
    packing: Literal["packed", "padded"] = "packed"
    longest_tokens: Count | None = None
    assignment: Literal["bounds", "batch"] | None = None
    shuffle: bool = True
    seed: int | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        if isinstance(given, dict):
            given = dict(given)
            if given.get("overlong") is None:
                given["overlong"] = "truncate" if given.get("source", "stdlib") == "stdlib" else "error"
            if given.get("global_batch_sequences") is None and given.get("global_batch_tokens") is None:
                given["global_batch_sequences"] = 64
        return given

    @pydantic.model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.global_batch_sequences is not None and self.global_batch_tokens is not None:
            raise ValueError("global_batch_sequences and global_batch_tokens are both given: keep one of them")
        if self.source == "stdlib" and self.path is not None:
            raise ValueError(
                f"path {self.path!r} is given, but source stdlib reads none: leave path out or name its source"
            )
        if self.source != "stdlib" and self.path is None:
            raise ValueError(f"path is missing: source {self.source} needs one")
        if self.source == "megatron" and self.tokenizer != "bytes":
            raise ValueError("tokenizer is given, but source megatron holds tokens already: leave it out")
        if self.tokenizer == "bytes" and isinstance(self.end_of_document, str):
            raise ValueError(
                f"end_of_document {self.end_of_document!r} names a token, but bytes have none: write true or false"
            )
        if self.tokenizer != "bytes" and self.end_of_document is True:
            raise ValueError("end_of_document must name a token of the tokenizer, such as '</s>'")
        return self

    def check_paths(self) -> None:
        """Raises ValueError where a file or folder is missing or of the wrong kind; reads none of them."""
        if self.path is not None:
            path = Path(self.path)
            if self.source == "folder" and not path.is_dir():
                raise ValueError(f"data.path {path}: {_is_not(path, 'folder')}")
            if self.source == "jsonl" and not path.is_file():
                raise ValueError(f"data.path {path}: {_is_not(path, 'file')}")
            if self.source == "megatron":
                stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
                for suffix in (".bin", ".idx"):
                    part = stem.with_name(stem.name + suffix)
                    if not part.is_file():
                        raise ValueError(
                            f"data.path {path}: there is no {part}; give the name that .bin and .idx share"
                        )
        if self.tokenizer != "bytes" and not Path(self.tokenizer).is_file():
            raise ValueError(
                f"data.tokenizer {self.tokenizer}: {_is_not(Path(self.tokenizer), 'file')}; or write bytes"
            )


class OptimizerConfig(Section):
    """AdamW, its learning rate schedule and clipping. ``distributed`` shards its state over data-parallel ranks."""

    lr: Positive = 3e-4
    min_lr: NonNegative = 0.0
    warmup_steps: CountOrZero = 0
    decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    decay_steps: Count | None = None  # None: run.steps
    weight_decay: NonNegative = 0.1
    betas: Annotated[tuple[Fraction, Fraction], pydantic.Field(strict=False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    clip_grad: NonNegative = 1.0  # 0: no clipping
    distributed: bool = False

    @pydantic.model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}: lower it")
        if self.decay_steps is not None and self.decay_steps < self.warmup_steps:
            raise ValueError(f"decay_steps {self.decay_steps} is below warmup_steps {self.warmup_steps}: raise it")
        return self


class RecordConfig(Section):
    """Which steps keep their timeline: the first ones, then each ``trace_every``-th, ``trace_limit`` at most."""

    trace_first: CountOrZero = 20
    trace_every: Count = 50
    trace_limit: CountOrZero = 200


class RunConfig(Section):
    """How long, where to, in which type. ``switch_memory_mb`` bounds the extra memory of one switch (MiB).

    ``profile`` and ``memory_limit_gb`` (10^9 bytes of a rank; None: the machine's) are for what is planned:
    ``pool: auto`` and ``data.assignment: batch``. A profile that is not there is measured at start, and kept in that
    place (None: in the user's cache folder).
    """

    steps: Count = 20
    dtype: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: CountOrZero = 1234
    out: str = "runs/train"
    save_every: CountOrZero = 10  # steps; 0: never. The last step is saved too
    check_every: CountOrZero = 0  # steps; 0: never
    resume: bool = False
    switch_policy: Literal["balanced", "new_greedy"] = "balanced"
    switch_memory_mb: Count = 256
    overlap_switch: Literal["auto", "none", "flush", "both"] = "auto"
    cards_per_node: Count = 1
    plan_cache: str | None = None
    timeout_s: Positive = 600.0
    profile: str | None = None
    memory_limit_gb: Positive | None = None
    record: RecordConfig = RecordConfig()


class TrainingConfig(Section):
    """All that ``hotspa train`` needs. ``pool``, unless it is ``auto``, and ``home`` make ``strategy_pool``."""

    model: ModelConfig = pydantic.Field(default_factory=lambda: ModelConfig.model_validate({}))
    pool: str | list | dict = DEFAULT_POOL
    home: str | None = None
    data: DataConfig = pydantic.Field(default_factory=lambda: DataConfig.model_validate({}))
    optimizer: OptimizerConfig = OptimizerConfig()
    run: RunConfig = RunConfig()

    @pydantic.model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.is_auto:
            self._check_auto()
        else:
            StrategyPool.from_config(self.pool, home=self.home)
            if self.data.longest_tokens is not None:
                raise ValueError(
                    "data.longest_tokens is for pool auto: the pool's last bound says how long sequences may be"
                )
        if not self.is_planned:
            for name in ("profile", "memory_limit_gb"):
                if getattr(self.run, name) is not None:
                    raise ValueError(
                        f"run.{name} is given, but nothing is planned: write pool: auto, or data.assignment: batch"
                    )
        optimizer = self.optimizer
        if optimizer.warmup_steps > (optimizer.decay_steps or self.run.steps):
            raise ValueError(
                f"optimizer.warmup_steps {optimizer.warmup_steps} is above run.steps {self.run.steps}: "
                "lower it or train longer"
            )
        return self

    def _check_auto(self) -> None:
        if self.home is not None:
            raise ValueError(f"home {self.home} is given, but pool auto chooses its home: leave it out")
        if self.data.overlong != "error" and self.data.longest_tokens is None:
            raise ValueError(
                f"data.longest_tokens is missing: with pool auto, overlong {self.data.overlong} must know from which "
                "length on, in tokens"
            )

    @property
    def is_auto(self) -> bool:
        """Whether the pool is planned at start."""
        return self.pool == AUTO

    @property
    def assigns_per_batch(self) -> bool:
        return (self.data.assignment or ("batch" if self.is_auto else "bounds")) == "batch"

    @property
    def is_planned(self) -> bool:
        """Whether a profile is needed."""
        return self.is_auto or self.assigns_per_batch

    @property
    def strategy_pool(self) -> StrategyPool:
        """The pool, its dp not resolved yet: ``model.check_pool`` does that once the vocabulary is known."""
        return StrategyPool.from_config(self.pool, home=self.home)

    @property
    def data_seed(self) -> int:
        return self.run.seed if self.data.seed is None else self.data.seed


def _is_not(path: Path, kind: str) -> str:
    return f"is not a {kind}" if path.exists() else f"there is no such {kind}"
