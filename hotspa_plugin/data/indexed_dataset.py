"""Megatron's indexed data sets: a ``.bin`` of token ids and an ``.idx`` that says where each sequence lies.

The ``.idx`` holds, little-endian: the 9 bytes ``MMIDIDX\\0\\0``; version 1 as u64; a dtype code as u8; the number of
sequences and of document bounds as u64; each sequence's length (i32), then its byte offset in the ``.bin`` (i64);
then the document bounds (i64), the sequence at which each document starts, from 0 to the number of sequences. Read
from the format itself, so that no part of Megatron is imported. Modes of multimodal sets, which follow, are ignored.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Literal

import numpy as np

from hotspa_plugin.data.sequences import check_token_ids, digest_of

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
DTYPE_OF_CODE = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class IndexedDatasetSource:
    """A Megatron ``.bin``/``.idx`` pair as a ``SequenceSource``: one document, one sequence.

    ``prefix`` is the path without suffix (or with either). ``unit="sequence"`` takes the stored sequences one by one
    instead, for sets whose documents are cut into sentences or that have no document bounds. Empty documents are
    left out and counted in ``num_empty``. Both files are memory-mapped; token ids are checked as they are read.
    """

    def __init__(
        self, prefix: str | Path, *, vocab_size: int, unit: Literal["document", "sequence"] = "document"
    ) -> None:
        if unit not in ("document", "sequence"):
            raise ValueError(f"unit {unit!r}: choose document or sequence")
        prefix = str(prefix)
        if prefix.endswith((".bin", ".idx")):
            prefix = prefix[:-4]
        self._prefix = prefix
        self.vocab_size = vocab_size
        self._read_index(Path(prefix + ".idx"))
        self._map_tokens(Path(prefix + ".bin"))
        bounds = self._document_bounds if unit == "document" else np.arange(len(self._sequence_lengths) + 1)
        if unit == "document" and (len(bounds) == 0 or bounds[-1] != len(self._sequence_lengths)):
            raise ValueError(
                f"{prefix}.idx: documents end at sequence {bounds[-1] if len(bounds) else 0} of "
                f"{len(self._sequence_lengths)}: end the last document when writing it, or read it by sequences"
            )
        ends = np.concatenate([[0], np.cumsum(self._sequence_lengths, dtype=np.int64)])
        lengths = ends[bounds[1:]] - ends[bounds[:-1]]
        self._unit = unit
        self._units = np.flatnonzero(lengths)
        self.lengths = lengths[self._units]
        self._bounds = bounds
        self.num_empty = len(lengths) - len(self.lengths)
        if len(self.lengths) == 0:
            raise ValueError(f"{prefix}.idx: holds no {unit} with tokens: write documents into it, or name another")

    def _read_index(self, path: Path) -> None:
        header_bytes = len(MAGIC) + HEADER.size
        try:
            with open(path, "rb") as file:
                head = file.read(header_bytes)
                size_bytes = file.seek(0, 2)
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read ({error.strerror}): name the prefix of a .bin/.idx pair"
            ) from error
        if len(head) < header_bytes or head[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path}: is not the index of a Megatron data set (its first bytes differ)")
        version, code, num_sequences, num_bounds = HEADER.unpack(head[len(MAGIC) :])
        if version != 1:
            raise ValueError(f"{path}: has format version {version}, this reads version 1: write the data set again")
        if code not in DTYPE_OF_CODE:
            raise ValueError(f"{path}: dtype code {code} is no integer type: token ids must be integers")
        needed_bytes = header_bytes + 12 * num_sequences + 8 * num_bounds
        if size_bytes < needed_bytes:
            raise ValueError(f"{path}: has {size_bytes} bytes of {needed_bytes}: it is cut short, copy it again")
        self._dtype = np.dtype(DTYPE_OF_CODE[code])

        def array(dtype: str, count: int, offset: int) -> np.ndarray:
            if count == 0:  # an empty range cannot be mapped
                return np.zeros(0, dtype=dtype)
            return np.memmap(path, mode="r", dtype=dtype, shape=(count,), offset=offset)

        self._sequence_lengths = array("<i4", num_sequences, header_bytes)
        self._offsets_bytes = array("<i8", num_sequences, header_bytes + 4 * num_sequences)
        self._document_bounds = array("<i8", num_bounds, header_bytes + 12 * num_sequences)
        bounds = self._document_bounds
        if len(bounds) and (bounds[0] != 0 or (np.diff(bounds) < 0).any() or bounds[-1] > num_sequences):
            raise ValueError(
                f"{path}: document bounds do not ascend from 0 to at most {num_sequences}: the file is damaged"
            )
        if num_sequences and self._sequence_lengths.min() < 0:
            raise ValueError(f"{path}: a sequence has a negative length: the file is damaged")

    def _map_tokens(self, path: Path) -> None:
        try:
            size_bytes = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror}): it belongs beside its .idx") from error
        if len(self._offsets_bytes):
            ends = self._offsets_bytes + self._sequence_lengths.astype(np.int64) * self._dtype.itemsize
            if self._offsets_bytes.min() < 0 or ends.max() > size_bytes:
                raise ValueError(
                    f"{path}: has {size_bytes} bytes, its index needs {ends.max()}: it is cut short, copy it again"
                )
        self._bytes = np.memmap(path, mode="r", dtype=np.uint8) if size_bytes else np.zeros(0, dtype=np.uint8)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def tokens(self, index: int) -> np.ndarray:
        unit = self._units[index]
        parts = []
        for sequence in range(self._bounds[unit], self._bounds[unit + 1]):
            start = int(self._offsets_bytes[sequence])
            end = start + int(self._sequence_lengths[sequence]) * self._dtype.itemsize
            parts.append(np.frombuffer(self._bytes[start:end].tobytes(), dtype=self._dtype))
        tokens = np.concatenate(parts).astype(np.int64)
        check_token_ids(tokens, self.vocab_size, self.name(index))
        return tokens

    def name(self, index: int) -> str:
        return f"{self._prefix}.bin {self._unit} {self._units[index]}"

    def fingerprint(self) -> str:
        # the index, not every token: reading it all could take hours
        return digest_of(
            "indexed dataset",
            self._unit,
            self._dtype.str,
            str(self.vocab_size),
            self._sequence_lengths,
            self._document_bounds,
            self._bytes[:65536],
            self._bytes[-65536:],
        )
