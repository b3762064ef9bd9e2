"""Collectives on plain tensors, without autograd, over one process group and along any dim, equal pieces or not.

Pieces are by ceiling (``sharding.piece``): of n rows over p ranks each has ceil(n / p), the last ones fewer, perhaps none. A
collective pads every piece to ceil(n / p) and cuts afterwards, which leaves the whole exact: only the end of the joined
pieces is padding. Complex numbers travel as pairs of real ones, and 16-bit integers that are only moved as bytes: all backends
know these. All are the functional collectives (``torch.ops._c10d_functional``): they start at once and end in ``wait_tensor``;
``start_*``/``end_*`` leave room for work between the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.ir.sharding import ceil_div

_FUNCOL: Any = torch.ops._c10d_functional


class Group(NamedTuple):
    """This rank's process group along one axis (or several together): its name, this rank's index in it, its size."""

    name: str
    rank: int
    size: int


def own(size: int, group: Group) -> tuple[int, int]:
    """(offset, length) of this rank's piece of a dim."""
    step = ceil_div(size, group.size)
    start = min(size, step * group.rank)
    return start, min(step, size - start)


def padded(x: Tensor, dim: int, length: int) -> Tensor:
    """``x`` with zeros at the end of ``dim`` up to ``length``."""
    if x.shape[dim] == length:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], length - x.shape[dim], *x.shape[dim + 1 :]])], dim)


def own_piece(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """This rank's piece of a whole tensor, as a view."""
    return x.narrow(dim, *own(size, group))


def reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """All-reduce."""
    return _back(_wait(_FUNCOL.all_reduce(_real(x).contiguous(), op, group.name)), x.dim())


def start_gather(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All-gather along ``dim``, whose whole length is ``size``: begun."""
    mine = _moved(padded(x, dim, ceil_div(size, group.size))).contiguous()
    pending: Tensor = _FUNCOL.all_gather_into_tensor(mine, group.size, group.name)
    return pending


def end_gather(pending: Tensor, shape: torch.Size, dim: int, size: int, group: Group) -> Tensor:
    """``shape``: that of the local tensor that was gathered."""
    step = ceil_div(size, group.size)
    parts = _back(_wait(pending), len(shape)).view(group.size, *shape[:dim], step, *shape[dim + 1 :])
    return _joined(parts, dim).narrow(dim, 0, size)


def gather(x: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """All-gather along ``dim``, whose whole length is ``size``."""
    return end_gather(start_gather(x, dim, size, group), x.shape, dim, size, group)


def start_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Reduce-scatter along ``dim``: begun."""
    step = ceil_div(x.shape[dim], group.size)
    parts = _parted(padded(x, dim, step * group.size), dim, group.size)
    pending: Tensor = _FUNCOL.reduce_scatter_tensor(_real(parts.flatten(0, 1)), "sum", group.size, group.name)
    return pending


def end_scatter(pending: Tensor, shape: torch.Size, dim: int, group: Group) -> Tensor:
    """``shape``: that of the whole tensor that was scattered."""
    step = ceil_div(shape[dim], group.size)
    mine = _back(_wait(pending), len(shape)).view(*shape[:dim], step, *shape[dim + 1 :])
    return mine.narrow(dim, 0, own(shape[dim], group)[1])


def scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Reduce-scatter along ``dim``."""
    return end_scatter(start_scatter(x, dim, group), x.shape, dim, group)


def exchange(x: Tensor, dim: int, to_dim: int, size: int, to_size: int, group: Group) -> Tensor:
    """Split on ``dim`` -> split on ``to_dim``."""
    step, to_step = ceil_div(size, group.size), ceil_div(to_size, group.size)
    parts = _parted(padded(padded(x, dim, step), to_dim, to_step * group.size), to_dim, group.size)
    ones = [1] * group.size
    received = _back(_wait(_FUNCOL.all_to_all_single(_moved(parts), ones, ones, group.name)), parts.dim())
    return _joined(received, dim).narrow(dim, 0, size).narrow(to_dim, 0, own(to_size, group)[1])


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """All-to-all of rows: ``sent[j]`` rows to rank j, ``received[j]`` from it, both in rank order."""
    come = _wait(_FUNCOL.all_to_all_single(_moved(rows).contiguous(), received, sent, group.name))
    return _back(come, rows.dim())


def mirrored(x: Tensor, dim: int, group: Group) -> Tensor:
    """A whole tensor, ``dim`` in the order in which ranks hold its chunks if it is mirrored: 0, 2p - 1, 1, 2p - 2, ..."""
    order = [chunk for rank in range(group.size) for chunk in _chunks(rank, group.size, True)]
    return _reordered(x, dim, order)


def unmirrored(x: Tensor, dim: int, group: Group) -> Tensor:
    """The inverse of ``mirrored``."""
    order = [chunk for rank in range(group.size) for chunk in _chunks(rank, group.size, True)]
    return _reordered(x, dim, sorted(range(len(order)), key=order.__getitem__))


def cut_mirrored(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's two chunks of a whole tensor."""
    length = x.shape[dim] // (2 * group.size)
    return torch.cat([x.narrow(dim, chunk * length, length) for chunk in _chunks(group.rank, group.size, True)], dim)


def mirror(x: Tensor, dim: int, mirrored: bool, group: Group) -> Tensor:
    """Pieces of two neighbouring chunks -> pieces of chunks r and 2p - 1 - r (``mirrored``), or back. Outputs pass here, which
    may be the largest tensors of all: at most one copy is held beside the operand and the result."""
    size, length = group.size, x.shape[dim] // 2
    owner = {chunk: rank for rank in range(size) for chunk in _chunks(rank, size, mirrored)}
    before = {chunk: rank for rank in range(size) for chunk in _chunks(rank, size, not mirrored)}
    mine, wanted = _chunks(group.rank, size, not mirrored), _chunks(group.rank, size, mirrored)
    out = sorted(mine, key=lambda chunk: (owner[chunk], chunk))
    come = sorted(wanted, key=lambda chunk: (before[chunk], chunk))
    rows = _reordered(x.movedim(dim, 0), 0, [mine.index(chunk) for chunk in out])
    sent, received = ([length * sum(where[chunk] == rank for chunk in chunks) for rank in range(size)]
                      for where, chunks in ((owner, out), (before, come)))
    found = exchange_rows(rows, sent, received, group)
    del rows
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    for at, chunk in enumerate(wanted):
        result.narrow(dim, at * length, length).copy_(found.narrow(0, come.index(chunk) * length, length).movedim(0, dim))
    return result


def _chunks(rank: int, size: int, mirrored: bool) -> tuple[int, int]:
    """Which of 2p chunks a rank has."""
    return (rank, 2 * size - 1 - rank) if mirrored else (2 * rank, 2 * rank + 1)


def _reordered(x: Tensor, dim: int, order: list[int]) -> Tensor:
    """The chunks of a dim in another order."""
    if order == sorted(order):
        return x
    parts = x.unflatten(dim, (len(order), -1))
    found: Tensor = parts.index_select(dim, torch.tensor(order, device=x.device)).flatten(dim, dim + 1)
    return found


def start_pass(x: Tensor, by: int, group: Group) -> Tensor:
    """Send ``x`` to the rank ``by`` after this one and receive as much from the one ``by`` before it: begun."""
    to, source = (group.rank + by) % group.size, (group.rank - by) % group.size
    sent, received = ([x.numel() * (rank == at) for rank in range(group.size)] for at in (to, source))
    pending: Tensor = _FUNCOL.all_to_all_single(x.contiguous(), received, sent, group.name)
    return pending


def end_pass(pending: Tensor) -> Tensor:
    """What was received."""
    return _wait(pending)


def _real(x: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones, in a last dim more; what is real as it is."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _moved(x: Tensor) -> Tensor:
    """The same of what is only moved, where 16-bit integers are pairs of bytes too."""
    return x.contiguous().unsqueeze(-1).view(torch.int8) if x.dtype == torch.int16 else _real(x)


def _back(x: Tensor, dims: int) -> Tensor:
    """What ``_real`` or ``_moved`` made of a tensor of so many ``dims`` as it was."""
    if x.dim() == dims:
        return x
    return torch.view_as_complex(x) if x.is_floating_point() else x.view(torch.int16).squeeze(-1)


def _wait(pending: Tensor) -> Tensor:
    done: Tensor = _FUNCOL.wait_tensor(pending)
    return done


def _parted(x: Tensor, dim: int, parts: int) -> Tensor:
    """[..., parts * n, ...] -> contiguous [parts, ..., n, ...]."""
    parted: Tensor = x.unflatten(dim, (parts, x.shape[dim] // parts))
    return parted.movedim(dim, 0).contiguous()


def _joined(parts: Tensor, dim: int) -> Tensor:
    """[parts, ..., n, ...] -> [..., parts * n, ...]; a view when ``dim`` is the first."""
    whole: Tensor = parts.movedim(0, dim).flatten(dim, dim + 1)
    return whole
