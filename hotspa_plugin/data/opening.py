"""From what a user names as data to a source of sequences."""

from __future__ import annotations

from pathlib import Path

from hotspa_plugin.data.documents import DocumentStore, PythonLibrary, TextFolder, TokenizedSource
from hotspa_plugin.data.indexed_dataset import IndexedDatasetSource
from hotspa_plugin.data.jsonl import JsonLines, JsonTokenLines
from hotspa_plugin.data.sequences import Progress, SequenceSource
from hotspa_plugin.data.tokenizers import ByteTokenizer, Tokenizer

PYTHON = "python"  # the standard library of the running interpreter


def open_source(
    data: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    text_field: str = "text",
    tokens_field: str | None = None,
    progress: Progress | None = None,
) -> SequenceSource:
    """Opens data by what it is.

    ``python``; the prefix (or either file) of a Megatron ``.bin``/``.idx`` pair; a ``.jsonl`` file, with texts in
    ``text_field`` or, if ``tokens_field`` is given, token ids there; a folder of text files or one text file.
    Data that is tokenised already needs ``vocab_size`` (or a tokenizer that tells it); text is tokenised by
    ``tokenizer``, bytes by default.

    Raises:
        ValueError: there is nothing to train on, or the data is malformed; names file, line and way out.
    """
    known_vocab_size = vocab_size if vocab_size is not None else tokenizer.vocab_size if tokenizer is not None else None
    documents: DocumentStore
    path = Path(data)
    if str(data) == PYTHON:
        documents = PythonLibrary()
    elif path.suffix in (".bin", ".idx") or (not path.exists() and Path(f"{path}.idx").exists()):
        return IndexedDatasetSource(path, vocab_size=_required(known_vocab_size, path))
    elif path.suffix in (".jsonl", ".ndjson"):
        if tokens_field is not None:
            return JsonTokenLines(path, vocab_size=_required(known_vocab_size, path), field=tokens_field)
        documents = JsonLines(path, field=text_field)
    else:
        documents = TextFolder(path)
    return TokenizedSource(documents, tokenizer if tokenizer is not None else ByteTokenizer(), progress=progress)


def _required(vocab_size: int | None, path: Path) -> int:
    if vocab_size is None:
        raise ValueError(f"{path}: holds token ids: give the vocabulary size they were written with")
    return vocab_size
