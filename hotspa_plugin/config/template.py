"""The default configuration as a commented file."""

from __future__ import annotations

from hotspa_plugin.config.training import DEFAULT_POOL

_TEXT = f"""\
# Configuration of `hotspa train`. Every value here is the default: keep what you change, leave out the rest.

model:
  preset: tiny-llama          # tiny-llama, tiny-gpt, or null with sizes of your own below
  # num_layers: 4             # a size given here replaces the preset's
  # hidden_size: 128
  # num_attention_heads: 8
  # num_query_groups: 4       # key/value groups; left out: one per head
  # head_dim: 16              # left out: hidden_size / num_attention_heads
  # ffn_hidden_size: 384      # left out: 4 x hidden_size, or 8/3 x with swiglu
  # positions: rope           # rope, learned
  # max_positions: null       # of learned positions; null: the pool's last bound
  # norm: rmsnorm             # rmsnorm, layernorm
  # activation: swiglu        # swiglu, gelu
  # linear_bias: false
  # tied_embeddings: false    # one table for input and output
  vocab_size: null            # null: the tokenizer's
  make_vocab_size_divisible_by: 1   # times tp; 128 suits GPUs
  rotary_base: 10000
  qk_layernorm: false
  dropout: 0.0
  init_std: 0.02

# Strategies in ascending order of the longest sequence, in tokens, that runs under them.
# rc: full recomputation, rcs: selective, nosp: no sequence parallelism. dp follows from the number of ranks.
# auto: the fastest pool for this data by a profile of this machine, or the fastest static strategy (docs/planning.md).
pool: {DEFAULT_POOL}
home: null                    # the strategy that owns the optimizer state; null: the last one

data:
  source: stdlib              # stdlib (Python's own library), folder (a file, a sequence), jsonl, megatron (.bin/.idx)
  path: null
  text_key: text              # the key of a jsonl object that holds its text
  tokenizer: bytes            # bytes, or a tokenizer.json of Hugging Face's tokenizers
  end_of_document: null       # true or false with bytes; with a tokenizer the token that ends a document
  overlong: truncate          # what is over the last bound: error (default of other sources), truncate, split, drop
  global_batch_sequences: 64
  global_batch_tokens: null   # instead of sequences
  packing: packed             # packed, padded
  longest_tokens: null        # with pool auto, longer sequences are overlong; null: none is
  assignment: null            # by bounds (the pool's) or batch (each batch's own); null: batch with pool auto
  shuffle: true
  seed: null                  # null: run.seed

optimizer:                    # AdamW
  lr: 3.0e-4
  min_lr: 0.0
  warmup_steps: 0
  decay_style: cosine         # constant, linear, cosine, inverse-square-root
  decay_steps: null           # null: run.steps
  weight_decay: 0.1
  betas: [0.9, 0.95]
  eps: 1.0e-8
  clip_grad: 1.0              # 0: no clipping
  distributed: false          # shard the state over data-parallel ranks

run:
  steps: 20
  dtype: fp32                 # fp32, bf16
  device: auto                # auto (CUDA where every rank gets a GPU), cpu, cuda
  seed: 1234
  out: runs/train             # records and checkpoints
  save_every: 10              # steps between checkpoints, the last step is saved too; 0: none
  check_every: 0              # steps between checks of copies, switches and flushes for silent damage; 0: none
  resume: false               # continue the run in `out` from its last checkpoint
  switch_policy: balanced     # who sends what in a switch: balanced, new_greedy
  switch_memory_mb: 256       # extra memory that one switch may take
  overlap_switch: auto        # what moves while another bucket computes: flush (its gradients, needs a second slab of
                              # them), both (the next parameters as well), none; auto: none on CUDA, else what fits
  cards_per_node: 1           # network cards that a node's ranks share, for balancing
  plan_cache: null            # folder that keeps switch plans, which large worlds or other policies take long to make
  timeout_s: 600              # how long a rank waits for the others
  profile: null               # of hotspa profile, for pool auto and assignment batch; measured where it is missing
  memory_limit_gb: null       # of a rank, to plan with; null: what the machine has
  record:                     # steps that keep their timeline: the first ones, then each trace_every-th
    trace_first: 20
    trace_every: 50
    trace_limit: 200
"""


def default_config_text() -> str:
    """YAML with every key, its default and its meaning."""
    return _TEXT
