"""What was measured (or published) of a model on a machine: the figures that times and memory are predicted from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pydantic

from hotspa_plugin.cost.micro_batch import MicroBatchCost
from hotspa_plugin.layout import GPTSizes
from hotspa_plugin.strategy import ModelShape, ParallelStrategy

FORMAT, VERSION = "hotspa profile", 1

Positive = pydantic.PositiveFloat
NonNegative = pydantic.NonNegativeFloat
Count = pydantic.PositiveInt
Recompute = Literal["none", "selective", "full"]
Origin = Literal["measured", "published", "extrapolated"]


class Figures(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class ModelSizes(Figures):
    """The sizes of the model that was profiled; ``vocab_size`` counts the rows of the embedding."""

    name: str
    num_layers: Count
    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count
    head_dim: Count
    vocab_size: Count
    gated_mlp: bool = True
    tied_embeddings: bool = False
    num_learned_positions: pydantic.NonNegativeInt = 0
    biases: bool = False
    qk_norm: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def gpt_sizes(self) -> GPTSizes:
        """For shard layouts."""
        values = self.model_dump(exclude={"name", "head_dim"})
        return GPTSizes(**values, kv_channels=self.head_dim)

    def shape(self) -> ModelShape:
        """For checks of strategies."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            gated=self.gated_mlp,
            tied_embeddings=self.tied_embeddings,
            learned_positions=self.num_learned_positions > 0,
            max_positions=self.num_learned_positions or None,
        )


class StageFigures(Figures):
    """One pipeline stage of (tp, pp, recompute), and the memory that its micro-batches take.

    The time of a micro-batch of sequences s, forward and backward, is ``sum(a * s^2 + b * s) + c``. A rank needs
    ``activation_fixed_bytes + activation_bytes_per_token * tokens`` for micro-batches of so many tokens, all those in
    flight in a 1F1B pipeline together. ``time_error`` is the median, ``memory_error`` the largest relative error on
    lengths that the fit did not see (None: not known).
    """

    tp: Count
    pp: Count
    recompute: Recompute = "none"
    a_s_per_token2: NonNegative
    b_s_per_token: NonNegative
    c_s: NonNegative
    activation_bytes_per_token: Positive
    activation_fixed_bytes: NonNegative = 0.0
    origin: Origin
    note: str = ""
    time_error: NonNegative | None = None
    memory_error: NonNegative | None = None

    @property
    def cost(self) -> MicroBatchCost:
        return MicroBatchCost(a_s_per_token2=self.a_s_per_token2, b_s_per_token=self.b_s_per_token, c_s=self.c_s)

    @property
    def strategy(self) -> ParallelStrategy:
        """The strategy, dp unresolved."""
        return ParallelStrategy(tp=self.tp, pp=self.pp, recompute=self.recompute)


class MemoryFigures(Figures):
    """Bytes per parameter and per rank that do not depend on the batch.

    ``optimizer_bytes`` (per parameter: masters, where they are not the parameters themselves, and moments) is divided
    by dp with ``distributed_optimizer``. ``reserved_bytes`` is what a rank cannot use: contexts, communication
    buffers, fragmentation, and a margin.
    """

    device_bytes: Count
    reserved_bytes: pydantic.NonNegativeInt
    parameter_bytes: Count
    gradient_bytes: Count = 4
    optimizer_bytes: Count
    distributed_optimizer: bool = True


class Rate(Figures):
    """A bandwidth that was measured with ``num_ranks`` ranks."""

    num_ranks: Count
    bytes_per_s: Positive


class LinkFigures(Figures):
    """What links carry. Rates are one way: of a rank inside its node, of a network card between nodes.

    All-reduce rates are bus bandwidths: in one node by the group's ranks, between nodes by its ranks in each node.
    ``copy_bytes_per_s`` is what a rank copies in its own memory, ``latency_s`` what a round of messages takes at least.
    """

    cards_per_node: Count = 1
    intra_node: tuple[Rate, ...] = pydantic.Field(min_length=1)  # by ranks that exchange
    inter_node: tuple[Rate, ...] = pydantic.Field(min_length=1)  # by ranks that exchange
    all_reduce_in_node: tuple[Rate, ...] = pydantic.Field(min_length=1)
    all_reduce_between_nodes: tuple[Rate, ...] = pydantic.Field(min_length=1)
    copy_bytes_per_s: Positive
    latency_s: NonNegative
    note: str = ""


class MachineFigures(Figures):
    """Where the figures come from. ``num_ranks`` is given where they hold for so many ranks only.

    ``ranks_per_core``: busy ranks that share a core; 1 with a GPU, or cores enough, for every rank.
    """

    name: str
    ranks_per_node: Count
    num_ranks: Count | None = None
    ranks_per_core: float = pydantic.Field(default=1.0, ge=1)


class Profile(Figures):
    """All figures of one model on one kind of machine."""

    format: Literal["hotspa profile"] = FORMAT
    version: Literal[1] = VERSION
    source: str
    model: ModelSizes
    machine: MachineFigures
    stages: tuple[StageFigures, ...] = pydantic.Field(min_length=1)
    memory: MemoryFigures
    links: LinkFigures
    optimizer_s_per_parameter: NonNegative  # of a rank's own share
    reduce_overlaps: bool = False  # home's gradient reduction hides behind the last micro-batch
    time_error: NonNegative = 0.1  # relative error to expect where a stage does not say

    @pydantic.model_validator(mode="after")
    def _check(self) -> Profile:
        seen = set()
        for stage in self.stages:
            key = (stage.tp, stage.pp, stage.recompute)
            if key in seen:
                raise ValueError(f"stages: {stage.strategy} stands twice; keep one of them")
            seen.add(key)
        return self

    def stage(self, strategy: ParallelStrategy) -> StageFigures:
        """The figures of a strategy. ValueError naming those that there are."""
        for stage in self.stages:
            if (stage.tp, stage.pp, stage.recompute) == (strategy.tp, strategy.pp, strategy.recompute):
                return stage
        known = ", ".join(str(stage.strategy) for stage in self.stages)
        raise ValueError(f"strategy {strategy}: the profile of {self.model.name} has no figures for it; it has {known}")

    def check_model(self, model: ModelSizes) -> None:
        """Raises ValueError naming the first size in which ``model`` is not the profiled one."""
        for field in type(model).model_fields:
            ours, theirs = getattr(self.model, field), getattr(model, field)
            if field != "name" and ours != theirs:
                raise ValueError(
                    f"profile of {self.model.name} is of another model: its {field} is {ours}, that of {model.name} is "
                    f"{theirs}; measure one with hotspa profile --model"
                )

    def check_ranks(self, num_ranks: int, ranks_per_node: int) -> None:
        """Raises ValueError where the figures do not hold for so many ranks, or nodes of another size."""
        measured = self.machine
        if measured.num_ranks is not None and num_ranks != measured.num_ranks:
            raise ValueError(
                f"profile of {measured.name} was measured with {measured.num_ranks} ranks and holds for no other "
                f"number, but {num_ranks} were asked for; measure again with --ranks {num_ranks}"
            )
        if ranks_per_node > measured.ranks_per_node:
            raise ValueError(
                f"profile of {measured.name} knows nodes of {measured.ranks_per_node} ranks, but "
                f"{ranks_per_node} a node were asked for; use at most {measured.ranks_per_node}"
            )

    def with_distributed_optimizer(self, distributed: bool) -> Profile:
        """The same figures for a run that shards its optimizer state over data parallel, or does not."""
        memory = self.memory.model_copy(update={"distributed_optimizer": distributed})
        return self.model_copy(update={"memory": memory})

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"


def read_profile(path: str | Path) -> Profile:
    """Reads a profile file. ValueError naming file, key and what is wrong."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"profile {path}: there is no such file; hotspa profile writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"profile {path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"profile {path}:{error.lineno}: is not JSON ({error.msg})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"profile {path}: is no profile; hotspa profile writes one")
    if content.get("version") != VERSION:
        raise ValueError(
            f"profile {path}: is of version {content.get('version')}, but this program reads {VERSION}; measure again"
        )
    try:
        return Profile.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        raise ValueError(f"profile {path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None
