from __future__ import annotations

import ctypes
import os
import time

import pytest
import torch

from bayesian_attention.tasks.jobs import keep_freed_memory, run_jobs


def square(number: int) -> tuple[int, int, int]:
    return number * number, os.getpid(), torch.get_num_threads()


def fail_at_two(number: int) -> int:
    if number == 2:
        raise ValueError(f"job {number} is bad")
    return number


def fail_or_sleep(number: int) -> int:
    if number == 0:
        raise FloatingPointError("at once")
    time.sleep(300)
    return number


@pytest.mark.parametrize("processes", [0, 1])
def test_in_this_process_and_in_order(processes: int):
    results = list(run_jobs(square, [3, 1, 2], processes))
    assert [job for job, _ in results] == [3, 1, 2]
    assert [result[0] for _, result in results] == [9, 1, 4]
    assert {result[1] for _, result in results} == {os.getpid()}


def test_a_single_job_needs_no_process():
    [(job, result)] = run_jobs(square, [5], 8)
    assert (job, result[0], result[1]) == (5, 25, os.getpid())


@pytest.mark.parametrize("processes", [1, 2])
def test_no_jobs(processes: int):
    assert list(run_jobs(square, [], processes)) == []


def test_results_come_one_by_one():
    done = []

    def worker(number: int) -> int:
        done.append(number)
        return number

    results = run_jobs(worker, [1, 2, 3], 1)
    assert next(results) == (1, 1)
    assert done == [1]


def test_two_processes_give_what_one_gives():
    jobs = list(range(6))
    results = dict(run_jobs(square, jobs, 2))
    assert {job: result[0] for job, result in results.items()} == {job: job * job for job in jobs}
    assert os.getpid() not in {result[1] for result in results.values()}
    assert {result[2] for result in results.values()} == {max(1, (os.cpu_count() or 1) // 2)}


def test_an_exception_ends_a_sequence_of_jobs():
    results = run_jobs(fail_at_two, [0, 1, 2, 3], 1)
    assert [next(results), next(results)] == [(0, 0), (1, 1)]
    with pytest.raises(ValueError, match=r"^job 2 is bad$"):
        next(results)
    assert list(results) == []


def test_an_exception_in_a_process_arrives_without_waiting_for_the_others():
    begun = time.monotonic()
    with pytest.raises(FloatingPointError, match=r"^at once$"):
        list(run_jobs(fail_or_sleep, [0, 1, 2, 3], 2))
    assert time.monotonic() - begun < 120


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch, error: type[Exception]):
    opened = []

    def fail(name: str) -> None:
        opened.append(name)
        raise error(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    keep_freed_memory()
    assert opened
