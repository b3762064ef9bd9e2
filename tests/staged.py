"""Process groups whose ranks may share a GPU, as NCCL's may not: every collective goes by way of the host, through gloo.

What several ranks compute can so be compared with one process on a machine that has a single GPU: kernels, streams, random
numbers and memory are the device's, only the wire is not. ``register`` once a process, then name ``BACKEND`` as the backend;
tensors of every device are copied, those of the host too, so that a test without a GPU runs the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "staged"


class Arrival(dist.Work):
    """Work of the host whose results are copied to the device when somebody waits for it."""

    def __init__(self, works: Sequence[Any], pairs: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> None:
        super().__init__()
        self._works, self._pairs, self._scale, self._done = works, pairs, scale, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Until the copies are begun on the current stream."""
        if not self._done:
            self._done = True
            for work in self._works:
                work.wait()
            with torch.no_grad():
                for device, host in self._pairs:
                    device.detach().copy_(host if self._scale == 1.0 else host * self._scale)
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return self._done

    def get_future(self) -> torch.futures.Future[Any]:
        """One that is done."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([device for device, _ in self._pairs])
        return future


class Staged(dist.ProcessGroup):
    """See the file's head. Methods are called by torch under the names that it has had since 2.11."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._made: list[Arrival] = []  # torch holds the C++ half of a Work alone

    def _arrived(self, works: Sequence[Any], pairs: Sequence[tuple[Tensor, Tensor]], scale: float = 1.0) -> Arrival:
        made = Arrival(works, pairs, scale)
        made.wait()
        return made

    def _reduced(self, opts: Any) -> float:
        """By what a sum is multiplied: gloo has no mean."""
        if opts.reduceOp == dist.ReduceOp.AVG:
            opts.reduceOp = dist.ReduceOp.SUM
            return 1.0 / self.size()
        return 1.0

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Arrival:
        """In place."""
        opts = opts or dist.AllreduceOptions()
        scale, hosts = self._reduced(opts), [_copy(x) for x in tensors]
        return self._arrived([self._host.allreduce([x], opts) for x in hosts], list(zip(tensors, hosts, strict=True)), scale)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Arrival:
        """In place."""
        hosts = [_copy(x) for x in tensors]
        return self._arrived([self._host.broadcast(hosts, opts)], list(zip(tensors, hosts, strict=True)))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Arrival:
        """A list of tensors from every rank's."""
        into = [[_copy(x) for x in some] for some in outputs]
        work = self._host.allgather(into, [_copy(x) for x in inputs])
        pairs = [pair for some, hosts in zip(outputs, into, strict=True) for pair in zip(some, hosts, strict=True)]
        return self._arrived([work], pairs)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Arrival:
        """One tensor from every rank's, several times."""
        hosts = [_copy(x) for x in outputs]
        works = [self._host._allgather_base(host, _copy(x)) for host, x in zip(hosts, inputs, strict=True)]
        return self._arrived(works, list(zip(outputs, hosts, strict=True)))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Arrival:
        """One tensor from every rank's."""
        return self.all_gather_single_coalesced([output], [given])

    _allgather_base = all_gather_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Arrival:
        """This rank's piece of a sum, several times."""
        opts = opts or dist.ReduceScatterOptions()
        scale, hosts = self._reduced(opts), [_copy(x) for x in outputs]
        works = [self._host._reduce_scatter_base(host, _copy(x), opts) for host, x in zip(hosts, inputs, strict=True)]
        return self._arrived(works, list(zip(outputs, hosts, strict=True)), scale)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Arrival:
        """This rank's piece of a sum."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, given: Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Arrival:
        """Rows to and from every rank."""
        host = _copy(output)
        work = self._host.alltoall_base(host, _copy(given), received, sent)
        return self._arrived([work], [(output, host)])

    alltoall_base = all_to_all_single

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Arrival:
        """To another rank; not waited for here."""
        return self._begun([self._host.send([_copy(x)], to, tag) for x in tensors], [])

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Arrival:
        """From another rank; not waited for here."""
        hosts = [_copy(x) for x in tensors]
        works = [self._host.recv([x], source, tag) for x in hosts]
        return self._begun(works, list(zip(tensors, hosts, strict=True)))

    def _begun(self, works: Sequence[Any], pairs: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        self._made = [one for one in self._made if not one.is_completed()]
        self._made.append(Arrival(works, pairs))
        return self._made[-1]

    def barrier(self, opts: Any = None) -> Arrival:
        """Until all are here."""
        return self._arrived([self._host.barrier()], [])

    @property
    def group_name(self) -> str:
        """By which torch finds it."""
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def pg_name(self) -> str:
        """The same."""
        return self.group_name


def _copy(x: Tensor) -> Tensor:
    """On the host, contiguous, and never the tensor itself."""
    return x.detach().to("cpu", copy=True).contiguous()


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Staged:
    return Staged(store, rank, size, timeout)


def register() -> None:
    """Make ``BACKEND`` known to torch, for the host and for CUDA."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _made, devices=["cpu", "cuda"])
