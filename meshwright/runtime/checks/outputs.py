"""``OutputTensor``: an output of a parallel module, and what users compute from it: a DTensor with the numbers of the whole.

Elementwise operators, views and a few others run on pieces, as torch's DTensor runs them. Three things are otherwise there:

    a number taken out (item(), float(), if)   torch reads this rank's summand of a pending sum; here the sum is made first
    a plain tensor among the operands          torch raises; here it counts as the whole, as the first rank of the mesh has it
    an operator not known to be right there    here it runs on the whole tensors, on every rank

A plain tensor that requires a gradient is refused: it would get a DTensor for one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from meshwright.errors import RunError
from meshwright.runtime.state.pieces import of_first
from meshwright.runtime.state.reading import Readable, torch_dtensor
from meshwright.runtime.whole import Whole, gathered, is_view, mark_copies, refuse_collective, refuse_writing, written_by


class OutputTensor(Readable):
    """See the file's head. ``as_output`` makes a DTensor one."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, Whole) for kind in types):
            return NotImplemented
        return _run(func, args, kwargs or {})


def as_output(tensor: DTensor) -> DTensor:
    """The same tensor, as a ``OutputTensor``."""
    tensor.__class__ = OutputTensor
    return tensor


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator. Its way follows from its name, shapes and placements alone, so that all ranks take the same."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    refuse_collective(func, tensors)
    changed, name = written_by(func, args, kwargs), func.overloadpacket.__name__
    lead = next(x for x in tensors if isinstance(x, DTensor))
    alone = [x for x in tensors if not isinstance(x, DTensor) and x.ndim]
    if torch.is_grad_enabled() and any(x.requires_grad for x in alone):
        raise RunError(f"{func} joins an output of a parallel module with a plain tensor that requires a gradient. Make what "
                       f"is computed from the two a part of the model, or of its loss_fn=; or take output.full_tensor() first")
    refuse_writing(func, changed)

    def spread(x: Tensor) -> Tensor:
        if isinstance(x, DTensor):
            return x if any(x is one for one in changed) else torch_dtensor(x)
        if not x.ndim:
            return x
        mesh = lead.device_mesh
        return DTensor.from_local(of_first(x, lead), mesh, [Replicate()] * mesh.ndim, run_check=False)

    on_pieces = not {torch.Tag.pointwise, torch.Tag.inplace_view}.isdisjoint(func.tags) or is_view(func)
    on_pieces = on_pieces or name.rstrip("_") in _ON_PIECES
    result, whole = None, not on_pieces or any(x is one for x in changed for one in alone)
    if not whole:
        given = pytree.tree_map_only(Tensor, spread, (args, kwargs))
        for x in changed:
            x.__class__ = DTensor
        try:
            result = func(*given[0], **given[1])
        except (NotImplementedError, RuntimeError) as error:  # no sharding strategy, say; known from the shapes, on all ranks
            if isinstance(error, torch.OutOfMemoryError):
                raise
            whole = True
        finally:
            for x in changed:
                x.__class__ = OutputTensor
    if whole:
        result = gathered(func, args, kwargs, tensors, changed, torch.Tag.nondeterministic_seeded in func.tags)
    if changed:
        return changed[0] if len(changed) == 1 else tuple(changed)
    mark_copies(func, lead, result, whole)
    return pytree.tree_map_only(DTensor, as_output, result)


_ON_PIECES = frozenset({
    "detach", "alias", "clone", "_to_copy", "copy", "fill", "zero", "zeros_like", "ones_like", "empty_like", "full_like",
    "sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "var", "std", "norm", "linalg_vector_norm",
    "logsumexp", "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward",
    "nll_loss_backward", "mm", "bmm", "addmm",
})
"""Operators that torch's DTensor computes on pieces, beside elementwise ones and views, and that are common on outputs. Not
among them: losses that divide by the size of what they are given, which on pieces is that of the piece."""
