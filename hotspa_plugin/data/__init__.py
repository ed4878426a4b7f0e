"""Sequences, tokenizers, global batches, their assignment to buckets and replicas, and micro-batches.

The exchange of samples between ranks is in ``hotspa_plugin.data.exchange``, the one module here that imports
torch.distributed.
"""

from hotspa_plugin.data.assignment import (
    AssignedMicroBatch,
    BatchAssignment,
    BucketAssignment,
    BucketSpec,
    assign_batch,
    bucket_of_lengths,
)
from hotspa_plugin.data.documents import DocumentStore, PythonLibrary, TextFolder, TokenizedSource
from hotspa_plugin.data.global_batch import SequenceBatch
from hotspa_plugin.data.indexed_dataset import IndexedDatasetSource
from hotspa_plugin.data.jsonl import JsonLines, JsonTokenLines
from hotspa_plugin.data.length_distributions import draw_lengths, read_lengths, wikipedia_histogram
from hotspa_plugin.data.micro_batch import (
    PackedMicroBatch,
    PaddedMicroBatch,
    Sample,
    pack_micro_batch,
    pad_micro_batch,
)
from hotspa_plugin.data.overlong import LimitedSource, OverlongCounts, OverlongPolicy
from hotspa_plugin.data.sampler import GlobalBatchSampler
from hotspa_plugin.data.sequences import (
    RandomTokenSource,
    SequenceSource,
    TokenArraySource,
    num_target_tokens,
)
from hotspa_plugin.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

__all__ = [
    "AssignedMicroBatch",
    "BatchAssignment",
    "BucketAssignment",
    "BucketSpec",
    "ByteTokenizer",
    "DocumentStore",
    "GlobalBatchSampler",
    "HuggingFaceTokenizer",
    "IndexedDatasetSource",
    "JsonLines",
    "JsonTokenLines",
    "LimitedSource",
    "OverlongCounts",
    "OverlongPolicy",
    "PackedMicroBatch",
    "PaddedMicroBatch",
    "PythonLibrary",
    "RandomTokenSource",
    "Sample",
    "SequenceBatch",
    "SequenceSource",
    "TextFolder",
    "TokenArraySource",
    "TokenizedSource",
    "Tokenizer",
    "assign_batch",
    "bucket_of_lengths",
    "draw_lengths",
    "num_target_tokens",
    "pack_micro_batch",
    "pad_micro_batch",
    "read_lengths",
    "wikipedia_histogram",
]
