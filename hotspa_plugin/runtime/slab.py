"""A storage of a rank that the tensors of several strategies share, one strategy at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

# Wide enough for vectorised loads of any dtype from the start of every tensor.
_ALIGNMENT_BYTES = 64


class Slab:
    """A storage that is sized for one strategy at a time and can be empty.

    Each strategy's tensors are views made once; they stay valid objects while the storage is empty,
    and come back to life, with undefined contents, when it is sized again.
    """

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes held now."""
        return self._bytes.untyped_storage().nbytes()

    def reserve(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None
    ) -> tuple[dict[str, torch.Tensor], int]:
        """Views in this slab shaped like ``tensors`` (of ``dtype`` where given), and the bytes they need.

        Every call lays its views out from the slab's start.
        """
        views, offset = {}, 0
        for name, like in tensors.items():
            view_dtype = dtype or like.dtype
            element_offset = offset // view_dtype.itemsize
            view = torch.empty(0, dtype=view_dtype, device=self._bytes.device)
            strides = torch.empty(like.shape, device="meta").stride()
            view.set_(self._bytes.untyped_storage(), element_offset, like.shape, strides)
            views[name] = view
            offset += math.ceil(like.numel() * view_dtype.itemsize / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.release()
        return views, offset

    def size_for(self, num_bytes: int) -> None:
        """Makes the slab hold ``num_bytes``; what it held is lost where the size changes."""
        storage = self._bytes.untyped_storage()
        if storage.nbytes() != num_bytes:
            storage.resize_(0)  # freed first, so that old and new never stand side by side
            storage.resize_(num_bytes)

    def release(self) -> None:
        """Gives the memory back; views keep their shapes but must not be read until sized again."""
        self._bytes.untyped_storage().resize_(0)

    def fill(self, byte: int) -> None:
        """Sets every byte; 0xFF makes every floating-point element a NaN."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._bytes.device)
        whole.set_(self._bytes.untyped_storage(), 0, (self.num_bytes,), (1,))
        whole.fill_(byte)
