"""JSON lines: one document, or one list of token ids, a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hotspa_plugin.data.sequences import check_token_ids, digest_of


class JsonLines:
    """A JSON-lines file as a store of texts (a ``DocumentStore``): the string in ``field`` of every line.

    The file is read once at start to learn the sizes; a text is read again when it is asked for. Blank lines are
    passed over; empty texts are left out and counted in ``num_empty``.
    """

    def __init__(self, path: str | Path, *, field: str = "text") -> None:
        self._file = _LineFile(path)
        self._field = field
        self.num_empty = 0
        sizes: list[int] = []
        kept: list[int] = []
        for line, value in self._file.scan():
            size = len(self._text(line, value))
            if size:
                kept.append(line)
                sizes.append(size)
            else:
                self.num_empty += 1
        if not sizes:
            raise ValueError(
                f"{path}: holds no text in field {field!r} ({self.num_empty} empty): check the file and field"
            )
        self._lines = np.array(kept, dtype=np.int64)
        self.sizes_bytes = np.array(sizes, dtype=np.int64)

    def _text(self, line: int, value: Any) -> bytes:
        text = self._file.field_of(line, value, self._field)
        if not isinstance(text, str):
            raise ValueError(
                f"{self._file.name(line)}: field {self._field!r} is a {type(text).__name__}, not a string: "
                "name the field that holds the text (a list of ids belongs to a token file)"
            )
        return text.encode("utf-8", "surrogatepass")  # JSON can spell lone surrogates

    def read(self, index: int) -> bytes:
        line = int(self._lines[index])
        return self._text(line, self._file.read(line))

    def name(self, index: int) -> str:
        return self._file.name(int(self._lines[index]))

    def fingerprint(self) -> str:
        return digest_of("json lines", self._field, self._file.content_digest)


class JsonTokenLines:
    """A JSON-lines file of token ids (a ``SequenceSource``): the list of integers in ``field`` of every line.

    All ids are checked at start. Empty lists are left out and counted in ``num_empty``.
    """

    def __init__(self, path: str | Path, *, vocab_size: int, field: str = "tokens") -> None:
        self._file = _LineFile(path)
        self._field = field
        self.vocab_size = vocab_size
        self.num_empty = 0
        lengths: list[int] = []
        kept: list[int] = []
        for line, value in self._file.scan():
            tokens = self._tokens(line, value)
            check_token_ids(tokens, vocab_size, self._file.name(line))
            if len(tokens):
                kept.append(line)
                lengths.append(len(tokens))
            else:
                self.num_empty += 1
        if not lengths:
            raise ValueError(
                f"{path}: holds no tokens in field {field!r} ({self.num_empty} empty): check file and field"
            )
        self._lines = np.array(kept, dtype=np.int64)
        self.lengths = np.array(lengths, dtype=np.int64)

    def _tokens(self, line: int, value: Any) -> np.ndarray:
        ids = self._file.field_of(line, value, self._field)
        if not isinstance(ids, list) or not all(type(token) is int and abs(token) < 2**63 for token in ids):
            raise ValueError(f"{self._file.name(line)}: field {self._field!r} must be a list of integers")
        return np.array(ids, dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def tokens(self, index: int) -> np.ndarray:
        line = int(self._lines[index])
        tokens = self._tokens(line, self._file.read(line))
        if len(tokens) != self.lengths[index]:
            raise ValueError(f"{self.name(index)}: changed since the start: keep the data unchanged during a run")
        check_token_ids(tokens, self.vocab_size, self.name(index))
        return tokens

    def name(self, index: int) -> str:
        return self._file.name(int(self._lines[index]))

    def fingerprint(self) -> str:
        return digest_of("json token lines", self._field, str(self.vocab_size), self._file.content_digest)


class _LineFile:
    """Random access to the lines of a file, by 0-based line; messages count from 1 as editors do."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.content_digest = ""
        self._starts = np.zeros(1, dtype=np.int64)

    def scan(self) -> Iterator[tuple[int, Any]]:
        """(line, decoded value) of all lines that are not blank."""
        starts = [0]
        digest = hashlib.sha256()
        try:
            file = open(self.path, "rb")
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read ({error.strerror}): check the path of the data") from error
        with file:
            for line, content in enumerate(file):
                starts.append(starts[-1] + len(content))
                digest.update(content)
                if content.strip():
                    yield line, self._decode(line, content)
        self._starts = np.array(starts, dtype=np.int64)
        self.content_digest = digest.hexdigest()

    def read(self, line: int) -> Any:
        start, end = self._starts[line : line + 2].tolist()
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                return self._decode(line, file.read(end - start))
        except OSError as error:
            raise ValueError(f"{self.path}: cannot be read any more ({error.strerror})") from error

    def _decode(self, line: int, content: bytes) -> Any:
        try:
            return json.loads(content.decode("utf-8-sig" if line == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.name(line)}: not a line of JSON ({error}): mend or remove the line") from error

    def field_of(self, line: int, value: Any, field: str) -> Any:
        if not isinstance(value, dict):
            raise ValueError(
                f"{self.name(line)}: is a {type(value).__name__}, not a JSON object with a field {field!r}"
            )
        if field not in value:
            raise ValueError(f"{self.name(line)}: has no field {field!r}, only {sorted(value)}: name the right field")
        return value[field]

    def name(self, line: int) -> str:
        return f"{self.path}:{line + 1}"
