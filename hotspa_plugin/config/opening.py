"""From a configuration's data section to the sequences it names."""

from __future__ import annotations

from hotspa_plugin.config.training import DataConfig
from hotspa_plugin.data import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    IndexedDatasetSource,
    JsonLines,
    LimitedSource,
    PythonLibrary,
    SequenceSource,
    TextFolder,
    TokenizedSource,
)


def open_data(config: DataConfig, *, bound_tokens: int, vocab_size: int | None = None) -> LimitedSource:
    """The sequences that ``config`` names, none longer than ``bound_tokens``; ``counts`` says what was cut.

    ``vocab_size`` is the model's, where it has one of its own: token ids must be below it.
    Raises ValueError naming file and way out.
    """
    config.check_paths()
    return LimitedSource(_open(config, vocab_size), bound_tokens=bound_tokens, policy=config.overlong)


def _open(config: DataConfig, vocab_size: int | None) -> SequenceSource:
    if config.source == "megatron":
        if vocab_size is None:
            raise ValueError(
                "model.vocab_size is missing: source megatron holds token ids, so give the vocabulary size they were "
                "written with"
            )
        return IndexedDatasetSource(config.path, vocab_size=vocab_size)
    if config.tokenizer == "bytes":
        tokenizer = ByteTokenizer(end_of_document=bool(config.end_of_document))
    else:
        tokenizer = HuggingFaceTokenizer(config.tokenizer, end_of_document=config.end_of_document)
    documents = {
        "stdlib": lambda: PythonLibrary(),
        "folder": lambda: TextFolder(config.path),
        "jsonl": lambda: JsonLines(config.path, field=config.text_key),
    }[config.source]()
    return TokenizedSource(documents, tokenizer)
