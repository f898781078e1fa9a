"""Running independent jobs in several processes."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import connection
from typing import TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")

# Numbers of the parameters in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def run_jobs(worker: Callable[[Job], Result], jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, Result]]:
    """Yield each job with its result as it finishes.

    Graphs are small: one thread a process and a process a core is faster than all threads on one job.

    Args:
        worker: a function of a module's top level.
        jobs: its arguments.
        processes: how many run at once; 1 runs them in this process, with the threads it has.
    """
    if processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, worker(job)
        return
    threads = max(1, (os.cpu_count() or 1) // processes)
    # spawn: a fork of a process in which PyTorch has started threads can hang.
    context = multiprocessing.get_context("spawn")
    before = multiprocessing.active_children()
    with ProcessPoolExecutor(processes, context, initializer=_set_up, initargs=(threads,)) as pool:
        futures = {pool.submit(worker, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            # Without this, leaving early would wait for every job, those that have not begun included.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                if child not in before:
                    child.terminate()
            raise


def keep_freed_memory() -> None:
    """Ask the C library to reuse freed memory instead of returning it to the system.

    Every operation on edges allocates some megabytes. By default glibc maps and unmaps such blocks each time,
    and the page faults cost more than the arithmetic. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 64 << 20)


def _set_up(threads: int) -> None:
    # Ctrl-C reaches every process of the terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    keep_freed_memory()


def _end_with_parent() -> None:
    """A parent that was killed cannot end its workers, so they watch it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
