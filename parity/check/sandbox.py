"""A process of its own for code that is not ours, with a limit of time and of memory, whatever it does.

The child is forked where that is safe, so that it starts at once with everything imported. It tells what it is at;
once it hangs, dies or takes its leave, that is what the report says.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

GRACE = 15.0  # seconds beyond its limit, for what no alarm can interrupt
LAST_WORDS = 300  # characters


@dataclass(frozen=True)
class Limits:
    """What a candidate may take: seconds of one scenario, and bytes beyond what the process has at its start."""

    seconds: float = 60.0
    memory: int = 4 * 2**30


@dataclass(frozen=True)
class Gone:
    """A child that did not come to its end: what happened, and what it was at."""

    what: str
    at: str


class TimeUp(BaseException):
    """The candidate took too long; no `except Exception` of its own holds it up."""


Send = Callable[[str, Any], None]


def run(work: Callable[[Send], Any], limits: Limits, tell: Callable[[str, Any], None]) -> Any:
    """Run `work(send)` in a process of its own.

    Args:
        work: on systems without fork it must be picklable.
        tell: called with every kind and value that the work sends. "at" says what it is doing.

    Returns:
        What it returns, or `Gone`.

    Raises:
        Exception: what the work raises.
    """
    context: Any = get_context("fork" if sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryFile() as words:
        child = context.Process(target=_child, args=(work, theirs, limits, words.fileno()), daemon=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which ours does not touch
            child.start()
        theirs.close()
        try:
            return _attend(child, ours, limits, tell, words)
        finally:
            _end(child)


def _end(child: Any) -> None:
    """End it, and whatever it has started and left behind."""
    if hasattr(os, "killpg"):
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    if child.is_alive():
        child.kill()
    child.join()


def _attend(child: Any, ours: Connection, limits: Limits, tell: Callable[[str, Any], None], words: IO[bytes]) -> Any:
    at, deadline = "its start", time.monotonic() + limits.seconds + GRACE
    while True:
        if not ours.poll(max(0.0, deadline - time.monotonic())):
            child.kill()
            return Gone(f"does not come to an end within {limits.seconds:g} s; it was killed", at)
        try:
            kind, value = ours.recv()
        except EOFError:
            child.join()
            return Gone(_ended(child.exitcode) + _last(words), at)
        if kind == "result":
            return value
        if kind == "error":
            raise value
        deadline = time.monotonic() + limits.seconds + GRACE
        at = value if kind == "at" else at
        tell(kind, value)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"kills the process ({name}{', perhaps for want of memory' if name == 'SIGKILL' else ''})"
    return f"ends the process itself, with exit code {code}"


def _last(words: IO[bytes]) -> str:
    words.seek(0)
    lines = words.read().decode(errors="replace").splitlines()
    text = " ".join(" ".join(line for line in lines if not line.startswith("[transformers]")).split())
    return f"; its last words: {text[-LAST_WORDS:]}" if text else ""


def _child(work: Callable[[Send], Any], pipe: Connection, limits: Limits, words: int) -> None:
    with suppress(OSError, AttributeError):  # what it starts belongs to it, and ends with it
        os.setpgrp()
    with suppress(OSError):  # its words are kept for the case that it dies
        os.dup2(words, 1)
        os.dup2(words, 2)
    limit_memory(limits.memory)
    me = os.getpid()

    def send(kind: str, value: Any) -> None:
        if os.getpid() != me:
            os._exit(0)  # a copy that the candidate made of this process, and that came back from it
        pipe.send((kind, value))

    try:
        result = work(send)
    except BaseException as error:
        send("error", _portable(error))
    else:
        send("result", result)
    pipe.close()
    os._exit(0)  # no handlers of the parent, nor of the candidate


def _portable(error: BaseException) -> Exception:
    """The error itself if it is one and survives the journey, else its text."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
        text = str(error)
    except Exception:
        text = "which cannot be told"
    else:
        if isinstance(error, Exception):
            return error
    return RuntimeError(f"{type(error).__name__}: {text}")


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has now, where the system can be asked."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    except (ImportError, OSError, ValueError):
        return


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeUp in what runs longer, where the system has alarms and this is the main thread."""
    try:
        before = signal.signal(signal.SIGALRM, _ring)
    except (AttributeError, ValueError):
        yield
        return
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ring(*_: Any) -> None:
    raise TimeUp
