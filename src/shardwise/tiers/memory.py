"""Memory that direct disk transfers like, and the bytes of tensors.

Owns aligned buffers and the check that a tensor is one stretch of host memory. Refuses to know disks.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from shardwise.device import pin_memory
from shardwise.errors import UsageError, explain

__all__ = ["HUGE_PAGE", "Bytes", "aligned_bytes", "bytes_of", "round_up"]

Bytes = npt.NDArray[np.uint8]
"""1-D uint8 array over memory that a tensor owns."""

HUGE_PAGE = 2 << 20
"""Note *huge pages*. A direct transfer hands the device a list of the pages that the buffer lies on. With pages of 4 KiB that
list is what limits the speed: on the virtual disk where this was measured, requests of 8 MiB ran at 0.7 GB/s from small pages
and at 2.4 GB/s from huge ones. So a buffer starts on a huge page, and the system is asked, not required, to use them."""


def round_up(nbytes: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


def aligned_bytes(nbytes: int, alignment: int = 4096, *, pinned: bool = False) -> torch.Tensor:
    """A 1-D uint8 tensor of `nbytes` bytes, zero at first, that starts on a multiple of `alignment`.

    What lies in such memory travels to and from a disk without a copy. The memory is the system's until it is touched, and
    goes back when the last view of it is gone. Forked children do not get it (see open(2): a fork during a direct read into
    private memory can send the data astray), so they must not touch it.

    Args:
        nbytes: size, at least 1.
        alignment: a power of two.
        pinned: page-locked memory, from which copies to an accelerator do not block; no effect without an accelerator.
    """
    if pinned and torch.accelerator.is_available():
        # The system gives page-locked memory in whole pages, so the slack serves larger alignments only.
        return _aligned(pin_memory(torch.zeros(nbytes + alignment, dtype=torch.uint8)), nbytes, alignment)
    large = nbytes >= HUGE_PAGE
    start = max(alignment, HUGE_PAGE) if large else alignment
    slack = start if start > mmap.PAGESIZE else 0
    memory = mmap.mmap(-1, nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory, *(["MADV_HUGEPAGE"] if large else []), "MADV_DONTFORK")
    return _aligned(torch.frombuffer(memory, dtype=torch.uint8), nbytes, start)


def bytes_of(tensor: torch.Tensor, nbytes: int) -> Bytes:
    """The memory of a tensor, without a copy.

    Raises:
        UsageError: the tensor is not one stretch of `nbytes` bytes in host memory.
    """
    size = tensor.numel() * tensor.element_size()
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous() or size != nbytes:
        raise UsageError(
            explain(
                "a tier moves the bytes of flat tensors",
                expected=f"a contiguous tensor of {nbytes:,} bytes in host memory",
                found=f"{tuple(tensor.shape)} x {tensor.dtype} on {tensor.device}, {size:,} bytes"
                + ("" if tensor.is_contiguous() else ", not contiguous"),
                do="pass a tensor as long as the range; copy others to a contiguous one on the CPU first",
            )
        )
    array: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array


def _aligned(raw: torch.Tensor, nbytes: int, alignment: int) -> torch.Tensor:
    skip = -raw.data_ptr() % alignment
    return raw[skip : skip + nbytes]


def _advise(memory: mmap.mmap, *names: str) -> None:
    for name in names:
        if hasattr(mmap, name):
            with suppress(OSError):  # advice: a system without huge pages does not take it
                memory.madvise(getattr(mmap, name))
