"""From the bytes of a document to token ids."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from hotspa_plugin.data.sequences import Progress, digest_of

ENCODE_BATCH_DOCUMENTS = 256


class Tokenizer(Protocol):
    """Turns a document's bytes into token ids in ``range(vocab_size)``, the same way every time."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of one document, int64 of shape ``[num_tokens]``."""
        ...

    def count(self, sizes_bytes: np.ndarray, texts: Iterable[bytes], progress: Progress | None) -> np.ndarray:
        """Tokens per document (int64); ``texts`` is consumed only where sizes do not tell."""
        ...

    def fingerprint(self) -> str: ...


class ByteTokenizer:
    """One token per byte, so 256 ids and any file is text; id 256 ends each document if asked for."""

    END_OF_DOCUMENT = 256

    def __init__(self, *, end_of_document: bool = False) -> None:
        self._end_of_document = end_of_document
        self.vocab_size = 257 if end_of_document else 256

    def encode(self, text: bytes) -> np.ndarray:
        tokens = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        return np.append(tokens, self.END_OF_DOCUMENT) if self._end_of_document else tokens

    def count(self, sizes_bytes: np.ndarray, texts: Iterable[bytes], progress: Progress | None) -> np.ndarray:
        return sizes_bytes.astype(np.int64) + int(self._end_of_document)

    def fingerprint(self) -> str:
        return digest_of("bytes", str(self._end_of_document))


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the Hugging Face ``tokenizers`` library.

    Bytes that are not UTF-8 become U+FFFD. No special tokens are added, except ``end_of_document`` (a token of the
    vocabulary, such as ``</s>``) after each document if given.
    """

    def __init__(self, path: str | Path, *, end_of_document: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(f"tokenizer {path}: needs the package 'tokenizers': pip install tokenizers") from error
        path = Path(path)
        try:
            content = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise ValueError(f"tokenizer {path}: not a readable tokenizers JSON file ({error})") from error
        # a file may ask for cut or padded encodings; the lengths of documents must be their own
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # ids may have gaps, so the size of the vocabulary is not the bound of its ids
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._end_of_document: list[int] = []
        if end_of_document is not None:
            token_id = self._tokenizer.token_to_id(end_of_document)
            if token_id is None:
                raise ValueError(f"tokenizer {path}: has no token {end_of_document!r} to end documents with")
            self._end_of_document = [token_id]
        self._fingerprint = digest_of("tokenizers", content, str(end_of_document))

    def encode(self, text: bytes) -> np.ndarray:
        encoding = self._tokenizer.encode(text.decode("utf-8", "replace"), add_special_tokens=False)
        return np.array(encoding.ids + self._end_of_document, dtype=np.int64)

    def count(self, sizes_bytes: np.ndarray, texts: Iterable[bytes], progress: Progress | None) -> np.ndarray:
        counts = np.zeros(len(sizes_bytes), dtype=np.int64)
        batch: list[str] = []
        done = 0

        def count_batch() -> None:
            nonlocal done
            for encoding in self._tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                counts[done] = len(encoding) + len(self._end_of_document)
                done += 1
            batch.clear()
            if progress is not None:
                progress(done, len(counts))

        for text in texts:
            batch.append(text.decode("utf-8", "replace"))
            if len(batch) == ENCODE_BATCH_DOCUMENTS:
                count_batch()
        if batch:
            count_batch()
        return counts

    def fingerprint(self) -> str:
        return self._fingerprint
