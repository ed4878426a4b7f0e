"""Sequences of tokens whose lengths are known before any token is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

Progress = Callable[[int, int], None]  # called with (documents done, documents in all)


@runtime_checkable
class SequenceSource(Protocol):
    """A list of token sequences that every rank sees alike.

    ``lengths`` (int64, shape ``[num_sequences]``, each at least 1) is known without reading a token, so that all
    ranks can agree on who trains what; each rank then reads only its own. A sequence of n tokens has n - 1 targets.
    """

    @property
    def lengths(self) -> np.ndarray: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """Every token id is in ``range(vocab_size)``."""
        ...

    def tokens(self, index: int) -> np.ndarray:
        """The int64 tokens of one sequence, shape ``[lengths[index]]``."""
        ...

    def name(self, index: int) -> str:
        """Where the sequence comes from, for messages."""
        ...

    def fingerprint(self) -> str:
        """Hex digest of what data this is; a resumed run compares it with the one it was saved with."""
        ...


def num_target_tokens(lengths: np.ndarray | Sequence[int]) -> int:
    """Positions that train: each sequence of n tokens predicts its own tokens 1 to n - 1."""
    return int(np.maximum(np.asarray(lengths, dtype=np.int64) - 1, 0).sum())


def check_token_ids(tokens: np.ndarray, vocab_size: int, name: str) -> None:
    """Raises ValueError where a token id lies outside ``range(vocab_size)``."""
    if len(tokens) == 0:
        return
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        position = int(np.argmax(outside))
        raise ValueError(
            f"{name}: token id {int(tokens[position])} at position {position} is outside the vocabulary of "
            f"{vocab_size}: set the vocabulary size of the tokenizer that wrote this data"
        )


def digest_of(*parts: bytes | str | np.ndarray) -> str:
    """Hex SHA-256 over parts, each prefixed with its size so that no two lists of parts collide."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            part = np.ascontiguousarray(part).tobytes()
        elif isinstance(part, str):
            part = part.encode("utf-8", "surrogateescape")
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class TokenArraySource:
    """Sequences held in memory: any list of integer arrays."""

    def __init__(
        self, arrays: Sequence[np.ndarray | Sequence[int]], *, vocab_size: int, names: Sequence[str] | None = None
    ) -> None:
        if len(arrays) == 0:
            raise ValueError("no sequences given: pass at least one array of tokens")
        if names is not None and len(names) != len(arrays):
            raise ValueError(f"{len(arrays)} sequences but {len(names)} names: pass one name each")
        self._names = names
        self.vocab_size = vocab_size
        self._arrays = []
        for index, given in enumerate(arrays):
            array = np.asarray(given)
            if array.ndim != 1 or len(array) == 0 or array.dtype.kind not in "iu":
                raise ValueError(
                    f"{self.name(index)}: expected a non-empty 1-d array of integers, got {array.dtype} "
                    f"of shape {array.shape}"
                )
            array = array.astype(np.int64)
            check_token_ids(array, vocab_size, self.name(index))
            array.setflags(write=False)
            self._arrays.append(array)
        self.lengths = np.array([len(array) for array in self._arrays], dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def tokens(self, index: int) -> np.ndarray:
        return self._arrays[index]

    def name(self, index: int) -> str:
        return self._names[index] if self._names is not None else f"sequence {index}"

    def fingerprint(self) -> str:
        return digest_of("token arrays", str(self.vocab_size), *self._arrays)


class RandomTokenSource:
    """Random tokens in sequences of given lengths, made anew from the seed at each read (nothing is held)."""

    def __init__(self, lengths: Sequence[int] | np.ndarray, *, vocab_size: int, seed: int = 0) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if self.lengths.ndim != 1 or len(self.lengths) == 0 or self.lengths.min() < 1:
            raise ValueError(f"lengths {list(lengths)[:8]}: give at least one, each 1 token or more")
        if vocab_size < 1:
            raise ValueError(f"vocabulary size {vocab_size}: must be at least 1")
        self.vocab_size = vocab_size
        self._seed = seed

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def tokens(self, index: int) -> np.ndarray:
        generator = np.random.RandomState([self._seed % 2**32, index % len(self.lengths)])
        return generator.randint(0, self.vocab_size, size=self.lengths[index], dtype=np.int64)

    def name(self, index: int) -> str:
        return f"random sequence {index}"

    def fingerprint(self) -> str:
        return digest_of("random tokens", str(self._seed), str(self.vocab_size), self.lengths)
