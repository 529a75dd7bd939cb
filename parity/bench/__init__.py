"""Measures speed: of the harness, and of our layers beside the reference's. Ratios from one process, medians.

The allocator decides ratios: the same layer takes several times as long when every large temporary is mapped and
unmapped. So a measuring process starts itself again with an allocator that keeps its memory, on one thread.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "KINETO_LOG_LEVEL": "99",  # the profiler, which counts memory, otherwise tells when it starts and stops
}


def settled() -> None:
    """Return in a process with the right environment; otherwise replace this process by such a one."""
    if all(os.environ.get(name) == value for name, value in ENVIRONMENT.items()):
        return
    os.execve(sys.executable, [sys.executable, "-m", "parity.bench", *sys.argv[1:]], os.environ | ENVIRONMENT)


def processor() -> str:
    """The processor and those of its features that decide which kernels run."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown processor"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in fields.items()}
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile")
    flags = [flag for flag in wanted if flag in facts.get("flags", "").split()]
    return f"{facts.get('model name', 'unknown processor')} ({', '.join(flags) or 'no vector flags'})"
