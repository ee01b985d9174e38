"""Memory that a process keeps between the steps of a run."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h
_LARGEST = 2**30


def keep_memory() -> bool:
    """Let the process keep what it frees, for its next large tensors; whether this C library can be told so.

    glibc gives a large block back to the system as soon as it is free and gets every page of the next one anew: in
    training, some tenths of the time of a pass. Only blocks above 1 GiB are still given back. Nothing else changes.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _LARGEST))
