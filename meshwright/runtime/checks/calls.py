"""A call that is right on every rank, or refused on every rank, before any of them starts to wait for another.

Each rank says, in one all-reduce of three numbers, whether its call is in order and what a digest of it is: the method, the
modes, and contents of the inputs. If a rank has an error, or the digests differ, all ranks exchange what they know and raise.
It runs over a group on the CPU, so that no device is waited for.

``digest`` reads a tensor whole in the first call, later evenly spaced elements (``SAMPLED``); what lies on a device is read in
the first call only, later its shape and dtype count. Of a DTensor the GLOBAL shape counts, for every rank brings its own share.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwright.errors import InputError, MeshwrightError, RunError
from meshwright.ir.graph import Ref
from meshwright.ir.mesh import PP
from meshwright.ir.program import InputRanges, Limit
from meshwright.runtime.checks.order import GatherOrder, Gone, difference
from meshwright.runtime.groups import Groups
from meshwright.runtime.interpret import run
from meshwright.runtime.verdict import interrupting, together

_METHOD = "method"
SAMPLED = 4096
"""Elements of a tensor that are read to tell it from another."""


def digest(tensor: Tensor, everything: bool) -> int:
    """A checksum of shape, dtype and contents (of ``everything``, or of evenly spaced elements)."""
    known = f"{tuple(tensor.shape)} {tensor.dtype}"
    if isinstance(tensor, DTensor) or tensor.is_meta or tensor.layout is not torch.strided:
        return zlib.crc32(f"{known} {tensor.is_meta}".encode())
    flat = tensor.detach().reshape(-1)
    if not everything:
        flat = flat[:: max(1, flat.numel() // SAMPLED)]
    return zlib.crc32(flat.contiguous().cpu().view(torch.uint8).numpy().data, zlib.crc32(known.encode()))


def digest_of_input(tensor: Tensor, first: bool) -> int:
    """Of an input, in the first call or a later one."""
    if not first and tensor.device.type != "cpu":
        return zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    return digest(tensor, first)


def check_bounds(bounds: InputRanges, given: Mapping[str, Tensor]) -> None:
    """Raise InputError, naming input and look-up, for an index that is out of range."""
    inputs: dict[str, Tensor] = {}
    for name in bounds.graph.inputs:
        tensor = given[name].detach()
        inputs[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()
    graph = bounds.graph
    try:
        with torch.no_grad():
            values = {**inputs, **run(graph, inputs)}
    except (RuntimeError, IndexError) as error:  # a look-up on the way to another: who came first is checked first
        for limit in sorted(bounds.limits, key=lambda limit: graph.producers.get(limit.value, -1)):
            ops = graph.ops[: graph.producers.get(limit.value, -1) + 1]
            _check(limit, {**inputs, **run(replace(graph, ops=ops, output_tree=(Ref(limit.value),)), inputs)}[limit.value])
        raise InputError(f"inputs {sorted(inputs)} lead to an index that is out of range ({error}); one process would raise, "
                         f"too. Check the tokenizer or the labels") from error
    for limit in bounds.limits:
        _check(limit, values[limit.value])


def _check(limit: Limit, index: Tensor) -> None:
    if limit.ignored is not None:
        index = index[index != limit.ignored]
    if not index.numel():
        return
    low, high = (int(x) for x in torch.aminmax(index))
    if low < limit.low or high >= limit.high:
        worst = low if low < limit.low else high
        ignored = "" if limit.ignored is None else f" or {limit.ignored} (ignored)"
        raise InputError(f"input {limit.source!r} leads to index {worst} in {limit.what}, which takes {limit.low} to "
                         f"{limit.high - 1}{ignored}; one process would raise, too. Check the tokenizer or the labels")


class Agreement:
    """What ranks say to each other before every call; ``order``: of what they gathered since the last. Making one is
    collective."""

    def __init__(self, groups: Groups) -> None:
        stages = groups.mesh.size(PP) if PP in groups.mesh.axes else 1
        self.order = GatherOrder(groups.coordinates[PP] if stages > 1 else 0, stages)
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.group = None if alone or dist.get_backend() != "nccl" else dist.new_group(backend="gloo")
        self.alone = alone
        self.calls = 0

    @property
    def first(self) -> bool:
        """Whether the coming call is the first."""
        return self.calls == 0

    def reach(self, problem: Exception | None, said: Mapping[str, Any]) -> None:
        """Raise on every rank if one has a problem, or if ranks do not say the same. Every rank calls this.

        ``said``: {what it is about: value} of a forward, the same on all ranks if all is well.
        """
        self.calls += 1
        self._agree(problem, {_METHOD: "the parallel module itself", **said})

    def on(self, method: str) -> None:
        """Raise on every rank unless all are in this method, which every rank has to call: where a loader ends earlier on one
        rank, that one saves while the others go on."""
        self._agree(None, {_METHOD: f"{method}()"})

    def _agree(self, problem: Exception | None, said: Mapping[str, Any]) -> None:
        if not self.alone:
            mine = zlib.crc32(repr(sorted(said.items())).encode())
            verdict = torch.tensor([problem is not None, mine, -mine, *self.order.said()])
            with interrupting():  # a rank that failed in the step before is no longer there
                dist.all_reduce(verdict, dist.ReduceOp.MAX, group=self.group)
            failed, largest, least, *orders = verdict.tolist()
            alike = self.order.alike(orders)
            gone = self.order.taken(alike)
            if not failed and largest == -least and alike:
                return
            everyone: list[Any] = [None] * dist.get_world_size()
            mine_said = None if problem is None else str(problem), dict(said), gone
            dist.all_gather_object(everyone, mine_said, group=self.group)
            problem = problem or _told(everyone)
        if problem is not None:
            raise problem


def _told(everyone: Sequence[tuple[str | None, Mapping[str, Any], Gone]]) -> MeshwrightError | None:
    """The error of another rank, or what ranks disagree about; None if only ranks that sent each other nothing went different
    ways before."""
    for rank, (problem, *_) in enumerate(everyone):
        if problem is not None:
            return InputError(f"rank {rank} refused this call: {problem}")
    first = everyone[0][1]
    for rank, (_, said, _) in enumerate(everyone):
        if said[_METHOD] != first[_METHOD]:
            return RunError(f"rank {rank} calls {said[_METHOD]} while rank 0 calls {first[_METHOD]}; these are calls of all "
                            f"ranks, in the same order on each. Call them outside of `if rank == 0`, and give every rank as "
                            f"many batches")
    if otherwise := difference([gone for *_, gone in everyone]):
        return otherwise
    odd = {rank: [key for key in first if said.get(key) != first[key]] for rank, (_, said, _) in enumerate(everyone)}
    odd = {rank: keys for rank, keys in odd.items() if keys}
    if not odd:
        return None
    rank, keys = next(iter(odd.items()))
    return InputError(f"ranks {sorted(odd)} make another call than rank 0: {', '.join(keys)} (rank {rank}: "
                      f"{', '.join(str(everyone[rank][1].get(key)) for key in keys)}; rank 0: "
                      f"{', '.join(str(first[key]) for key in keys)}). Every rank is given the same GLOBAL batch in the same "
                      f"mode; to bring a share of the batch each, give DTensors (parallel.data_rank, parallel.data_size)")


def same_weights(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The digest of each tensor, by evenly spaced elements. Every rank calls this, with its own model's tensors by name; those
    on the meta device are initialized alike later. Raises InputError on every rank unless all were given the same weights."""
    def read() -> dict[str, int]:
        try:
            return {name: digest(tensor.detach(), everything=False) for name, tensor in tensors.items()}
        except Exception as error:
            raise InputError(f"the weights that rank {dist.get_rank()} was given cannot be read ({type(error).__name__}: "
                             f"{error})") from error

    found = together(read)
    odd = _other_than_first(found)
    if odd:
        rank, names = next(iter(odd.items()))
        raise InputError(f"ranks {sorted(odd)} were given other weights than rank 0 ({len(names)} tensors of rank {rank}, the "
                         f"first is {names[0]!r}), so it is not clear which model is meant. Build or load the same weights on "
                         f"every rank: call torch.manual_seed with one number before the model is made, or load one checkpoint")
    return found


def same_initialization(made: Mapping[str, int]) -> None:
    """Raise InputError on every rank unless all of them initialized what both hold alike. Every rank calls this, with the
    digest of each tensor that its model made; those of other stages of a pipeline are not among them."""
    odd = _other_than_first(made, all_of_them=False)
    if odd:
        rank, names = next(iter(odd.items()))
        raise InputError(f"the model's own initialization makes other weights on ranks {sorted(odd)} than on those before them "
                         f"({len(names)} tensors of rank {rank}, the first is {names[0]!r}): from one seed it draws in another "
                         f"order in each process (does it walk a set?), or not with torch's default generator. What to do: let "
                         f"it draw in one order (of a list, or sorted), or build the model with real weights, the same on "
                         f"every rank")


def _other_than_first(mine: Mapping[str, int], all_of_them: bool = True) -> dict[int, list[str]]:
    """{rank: names of the tensors whose digest is another there than on the first rank that has them}; ``all_of_them``: every
    rank is to have them all. Every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, zlib.crc32(repr(sorted(mine.items())).encode()))
    if len(set(everyone)) == 1:
        return {}
    dist.all_gather_object(everyone, dict(mine))
    first: dict[str, int | None] = {}
    for said in everyone:
        first = {**said, **first}
    if all_of_them:
        first = {name: everyone[0].get(name) for name in first}
    odd = {rank: [name for name, value in first.items() if said.get(name, None if all_of_them else value) != value]
           for rank, said in enumerate(everyone)}
    return {rank: names for rank, names in odd.items() if names}
