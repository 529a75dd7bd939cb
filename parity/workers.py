"""Work for several processes: each is a fork, so that nothing is imported or planted twice."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

import torch

from parity.allocator import keep_memory
from parity.profiles import load_profile

Task = TypeVar("Task")
Done = TypeVar("Done")


def prepare() -> str:
    """Set a process up for runs: one thread, memory kept, the Hypothesis profile, whose name is returned."""
    torch.set_num_threads(1)
    keep_memory()
    return load_profile()


def _begin() -> None:
    """Ctrl-C reaches every process of a terminal; the one that is asked for results ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()


def finished(work: Callable[[Task], Done], left: Iterable[Task], workers: int) -> Iterator[Done]:
    """Results as they are finished, by so many processes; a single one is this one. Whoever stops it waits for none."""
    if workers == 1:
        yield from map(work, left)
        return
    waiting = iter(left)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=_begin) as pool:
        try:
            running: set[Future[Done]] = {pool.submit(work, task) for task in islice(waiting, 2 * workers)}
            while running:
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(work, task) for task in islice(waiting, len(ready))}
                yield from (future.result() for future in ready)
        except BaseException:  # a stop, or a result that is an error
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
                process.join()
            raise
