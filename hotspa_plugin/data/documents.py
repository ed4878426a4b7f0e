"""Text documents and the source that tokenises them: a folder of files, and the Python standard library."""

from __future__ import annotations

import ast
import os
import sysconfig
from pathlib import Path
from typing import Protocol

import numpy as np

from hotspa_plugin.data.sequences import Progress, check_token_ids, digest_of
from hotspa_plugin.data.tokenizers import Tokenizer

SNIFF_BYTES = 8192  # a NUL byte among the first ones marks a binary file, as git has it


class DocumentStore(Protocol):
    """Texts as bytes, with sizes known beforehand; order and content are the same on every rank."""

    @property
    def sizes_bytes(self) -> np.ndarray:
        """int64, shape ``[num_documents]``, each at least 1."""
        ...

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...

    def fingerprint(self) -> str: ...


class TokenizedSource:
    """The documents of a store as token sequences (a ``SequenceSource``): one document, one sequence.

    Documents are encoded when they are read. Their lengths come from sizes for byte tokens; another tokenizer runs
    once over everything at start, which ``progress`` can follow. A document without any token is left out and
    counted in ``num_empty``.
    """

    def __init__(self, documents: DocumentStore, tokenizer: Tokenizer, *, progress: Progress | None = None) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        texts = (documents.read(index) for index in range(len(documents.sizes_bytes)))
        lengths = tokenizer.count(documents.sizes_bytes, texts, progress)
        self._document_of_sequence = np.flatnonzero(lengths)
        self.lengths = lengths[self._document_of_sequence]
        self.num_empty = len(lengths) - len(self.lengths)
        if len(self.lengths) == 0:
            raise ValueError(f"{documents.name(0)}: the tokenizer makes no token of this or any other document")

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    def tokens(self, index: int) -> np.ndarray:
        tokens = self._tokenizer.encode(self._documents.read(self._document_of_sequence[index]))
        if len(tokens) != self.lengths[index]:
            raise ValueError(
                f"{self.name(index)}: has {len(tokens)} tokens now and had {self.lengths[index]} at start: "
                "keep the data unchanged during a run"
            )
        check_token_ids(tokens, self.vocab_size, self.name(index))
        return tokens

    def name(self, index: int) -> str:
        return self._documents.name(self._document_of_sequence[index])

    def fingerprint(self) -> str:
        return digest_of("tokenized", self._documents.fingerprint(), self._tokenizer.fingerprint())


class TextFolder:
    """All text files under a folder (or one text file), sorted by relative path: one file, one document.

    Any encoding is fine. Left out, and counted: binary files (a NUL byte near the start) in ``num_binary``, empty
    ones in ``num_empty``, hidden ones and all in hidden folders in ``num_hidden``. ``suffixes`` such as
    ``(".txt", ".md")`` restricts the choice; the rest is counted in ``num_other``.
    """

    def __init__(self, path: str | Path, *, suffixes: tuple[str, ...] | None = None) -> None:
        self._root = Path(path)
        self.num_binary = self.num_empty = self.num_hidden = self.num_other = 0
        self._names: list[str] = []
        sizes: list[int] = []
        heads: list[bytes] = []
        for name in self._candidates(suffixes):
            head, size = self._sniff(name)
            if size == 0:
                self.num_empty += 1
            elif b"\0" in head:
                self.num_binary += 1
            else:
                self._names.append(name)
                sizes.append(size)
                heads.append(head)
        if not self._names:
            raise ValueError(
                f"{path}: holds no text ({self.num_binary} binary, {self.num_empty} empty, {self.num_hidden} hidden "
                f"and {self.num_other} other files left out): name a folder with non-empty text files"
            )
        self.sizes_bytes = np.array(sizes, dtype=np.int64)
        self._fingerprint = digest_of("text folder", *self._names, self.sizes_bytes, *heads)

    def _candidates(self, suffixes: tuple[str, ...] | None) -> list[str]:
        if self._root.is_file():
            return [""]
        if not self._root.is_dir():
            raise ValueError(f"{self._root}: no such folder or file: check the path of the data")
        found = []
        for folder, subfolders, files in os.walk(self._root):
            hidden = [name for name in subfolders if name.startswith(".")]
            self.num_hidden += len(hidden)
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for name in files:
                path = os.path.join(folder, name)
                if name.startswith("."):
                    self.num_hidden += 1
                elif not os.path.isfile(path) or (suffixes is not None and not name.endswith(suffixes)):
                    self.num_other += 1
                else:
                    found.append(os.path.relpath(path, self._root))
        return sorted(found)

    def _sniff(self, name: str) -> tuple[bytes, int]:
        path = self._root / name
        try:
            with open(path, "rb") as file:
                return file.read(SNIFF_BYTES), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}): make it readable or move it away") from error

    def read(self, index: int) -> bytes:
        try:
            return (self._root / self._names[index]).read_bytes()
        except OSError as error:
            raise ValueError(f"{self.name(index)}: cannot be read any more ({error.strerror})") from error

    def name(self, index: int) -> str:
        return str(self._root / self._names[index])

    def fingerprint(self) -> str:
        return self._fingerprint


NOT_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})


class PythonLibrary:
    """The top-level functions and classes of the running interpreter's standard library, one document each.

    Real text on every machine: mostly short, with a heavy tail. Decorators belong to the document. The order is that
    of sorted module paths, then of lines. Installed packages and test folders are never read. A file that does not
    parse is left out and counted in ``num_unparsed``. All text (about 9 MB) is held in memory; reading it takes a
    second or two.
    """

    def __init__(self, *, max_files: int | None = None) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = NOT_LIBRARY_FOLDERS | TEST_FOLDERS
        files: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            files.extend(Path(folder, name) for name in names if name.endswith(".py"))
        self.num_unparsed = 0
        self._texts: list[bytes] = []
        self._names: list[str] = []
        for file in sorted(files, key=lambda file: file.relative_to(root).parts)[:max_files]:
            text = file.read_bytes()
            try:
                body = ast.parse(text).body
            except (SyntaxError, ValueError):
                self.num_unparsed += 1
                continue
            module = file.relative_to(root).as_posix()
            lines = text.splitlines(keepends=True)
            for node in body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                    self._texts.append(b"".join(lines[first - 1 : node.end_lineno]))
                    self._names.append(f"{module}:{first} {node.name}")
        if not self._texts:
            raise ValueError(f"{root}: this interpreter has no standard library as source files: name a folder of text")
        self.sizes_bytes = np.array([len(text) for text in self._texts], dtype=np.int64)

    def read(self, index: int) -> bytes:
        return self._texts[index]

    def name(self, index: int) -> str:
        return self._names[index]

    def fingerprint(self) -> str:
        return digest_of("python library", *self._texts)
