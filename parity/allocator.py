"""Keep memory between temporaries: glibc otherwise maps and unmaps each large one, which costs more than filling it."""

from __future__ import annotations

import ctypes

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3  # from malloc.h
OPTIONS = {MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 1 << 30, TOP_PAD: 64 << 20}  # the first is the most it takes


def keep_memory() -> bool:
    """Let malloc serve temporaries of up to 32 MiB from memory it keeps.

    Returns:
        Whether the C library could be asked to; elsewhere things only take longer.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in OPTIONS.items())
