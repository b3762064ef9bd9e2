"""A pool of worker processes for distributed tests, started once per pytest session.

Starting a process and importing torch costs seconds, a process group some hundredths of one: so all processes but the first are
forked from one that has imported everything (``tests.warm``), they live on, and every job gets a fresh default process group
(gloo's or that of ``tests.staged``, a store of its own) over the first ``world`` of them. A job is a module-level function,
called as ``fn(rank, *args)`` on each rank; it, its arguments and its result travel pickled. What one of the forked processes
makes for all of them, such as the graph of a model, the others read from a folder (``once``).

The first process is started anew, and makes everything itself: it hashes otherwise than the others, so that what depends on
the order of a set differs between ranks here too, and is found.

A rank that raises ends the job: the first error comes back with its traceback. A job that does not end in time, and one of
which some ranks failed while the others may still wait for them, is cut by replacing the processes.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import os
import pickle
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import debug

from tests.staged import register

LARGEST = 4
TIMEOUT = 300.0
START_TIMEOUT = 300.0
T = TypeVar("T")


class WorkerError(RuntimeError):
    """A job failed on a rank; the message holds the rank's traceback."""


_FOLDER: list[Path] = []
"""In a forked process: where what is made once for all of them lies."""


def once(name: str, make: Callable[[], T]) -> T:
    """What ``make`` returns, made by the first of the forked processes that asks for this name; rank 0, and a process that
    belongs to no pool, make their own."""
    if not _FOLDER:
        return make()
    path = _FOLDER[0] / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made = make()
            path.write_bytes(pickle.dumps(made))
            return made
    found: T = pickle.loads(path.read_bytes())
    return found


def _serve(rank: int, jobs: Any, results: Any, folder: str) -> None:
    import torch
    import torch._dynamo  # FSDP2 imports it when first used: seconds that belong to the start, not to a job

    if rank:
        _FOLDER.append(Path(folder))
    torch.set_num_threads(1)
    register()
    caches = _Caches()
    gc.freeze()
    results.put((0, rank, None, None))
    while (job := jobs.get()) is not None:
        number, world, store, backend, fn, args, timeout = job
        try:
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
            )
            dist.barrier()  # a rank that ends a short job closes connections that others are still making
            torch.manual_seed(0)
            results.put((number, rank, fn(rank, *args), None))
        except BaseException:
            results.put((number, rank, None, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            caches.empty()


class _Caches:
    """DTensor's caches: they are keyed by meshes that compare equal to the next job's, but hold groups that are gone."""

    def __init__(self) -> None:
        self._modules, self._found = 0, list[Any]()

    def empty(self) -> None:
        """Forget all, and what the job left in cycles: a group has four threads until it is collected. Caches of functions are
        looked for among all objects, which takes long, where a module is new."""
        debug._clear_sharding_prop_cache()
        fresh = len(sys.modules) != self._modules
        if fresh:
            self._modules = len(sys.modules)
            gc.unfreeze()  # what is frozen is neither listed nor collected
            self._found = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper
                           and one.__module__.startswith("torch.distributed")]
        for cached in self._found:
            cached.cache_clear()
        gc.collect()
        if fresh:
            gc.freeze()


class Pool:
    """Worker processes, one per rank, started when first needed."""

    def __init__(self) -> None:
        self._context, self._forking = mp.get_context("spawn"), mp.get_context("forkserver")
        self._forking.set_forkserver_preload(["tests.warm"])
        self._workers: list[tuple[Any, Any]] = []
        self._results: Any = None
        self._number = 0
        self._folder = tempfile.TemporaryDirectory()

    def run(
        self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, backend: str = "gloo"
    ) -> list[Any]:
        """``[fn(rank, *args) for rank in range(world)]``, each on a process of its own, in one process group; ``backend``: gloo
        or that of ``tests.staged``."""
        self._start(world)
        self._number += 1
        store = os.path.join(self._folder.name, f"store{self._number}")
        for _, jobs in self._workers[:world]:
            jobs.put((self._number, world, store, backend, fn, args, timeout))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < world:
            try:
                number, rank, value, error = self._results.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                missing = sorted(set(range(world)) - set(answers))
                self.close()
                raise WorkerError(f"{fn.__name__} did not end within {timeout} s on ranks {missing} of {world}") from None
            if number != self._number:
                continue
            if error is not None:
                self._settle(world, {*answers, rank})
                raise WorkerError(f"{fn.__name__} failed on rank {rank} of {world}:\n{error}")
            answers[rank] = value
        return [answers[rank] for rank in range(world)]

    def close(self) -> None:
        """End the processes."""
        for process, _ in self._workers:
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers, self._results = [], None

    def _settle(self, world: int, done: set[int], patience: float = 2.0) -> None:
        """After an error: wait a little for the other ranks; replace the processes if one is stuck."""
        deadline = time.monotonic() + patience
        while len(done) < world:
            try:
                number, rank, _, _ = self._results.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                return
            if number == self._number:
                done.add(rank)

    def _start(self, world: int) -> None:
        """Have at least ``world`` processes, ready to work."""
        if self._results is None:
            self._results = self._context.Queue()
        os.environ["OMP_NUM_THREADS"] = "1"  # inherited: must be set before torch is imported there
        starting = 0
        while len(self._workers) < max(world, LARGEST):
            jobs = self._context.Queue()
            given = len(self._workers), jobs, self._results, self._folder.name
            context: Any = self._forking if self._workers else self._context
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            self._workers.append((process, jobs))
            starting += 1
        for _ in range(starting):
            self._results.get(timeout=START_TIMEOUT)
