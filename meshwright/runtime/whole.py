"""``Whole``: a DTensor that computes what the one tensor it stands for would.

Optimizers, ``torch.nn.utils``, ``torch.nn.init`` and users' loops run operators on parameters and gradients. Torch's own
DTensor runs most of them on the pieces; but it refuses others in the middle of a step (Adafactor, Rprop, LBFGS), rounds sums of
bf16 products per piece (``torch.optim.Muon`` is off by percents), lets every rank draw the same random numbers for another
piece, and knows nothing of other stages. Here an operator goes one of four ways:

    elementwise, operands of one shape    every rank on its piece, nothing is sent; so copies, and what is like a tensor
    norms, sums and means                 every rank on its piece; what is pending is summed at once
    views                                 DTensor's own; what turns out to be a copy may be read, not written
    everything else, and what is random   on the whole tensors, gathered; a rank keeps its piece of what was written

A plain tensor of more than one number among the operands is taken from the first rank of the mesh, and so is what was drawn.
What comes out is ``Whole`` too, so an optimizer's state behaves as its parameter does.

In a pipeline a rank holds the tensors of its own stages, and a number made of several of them (a total norm) would be another
one on every stage: there what joins tensors of different parameters is refused (``_role_of_result``).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding
from torch.optim.optimizer import _foreach_supported_types as _fast_in_optimizers
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _foreach_supported_types as _fast_in_utilities
from torch.utils._mode_utils import no_dispatch

from meshwright.errors import RunError, StageWarning
from meshwright.runtime.checks import edits
from meshwright.runtime.checks.edits import Role, role_of
from meshwright.runtime.state.pieces import (
    cut_alike,
    dtensor_of,
    is_cut,
    is_pending,
    local_piece,
    of_first,
    piece_like,
    piece_of,
    whole_of,
)
from meshwright.runtime.state.reading import Readable, torch_dtensor
from meshwright.runtime.state.reduced import reduced, reduction

_DATA: Any = Tensor.data
_GRAD: Any = Tensor.grad


class Whole(Readable):
    """See the file's head. ``adopt`` makes a DTensor one."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Any:
        """As of any tensor; assigning it is refused where a parallel module holds the tensor: it would go on with the old.
        A gradient takes the new contents: torch's own DTensor would keep the old ones. What is written into the ``.data`` of a
        tensor that is held counts as written into that: a backward may need what was there."""
        found, role = _DATA.__get__(self), role_of(self)
        if role is not None and role.held == id(self):
            found.__dict__["_of"] = self
        return found

    @data.setter
    def data(self, new: Tensor) -> None:
        role = role_of(self)
        if role is not None and role.held == id(self):
            raise RunError(f"{role.name!r} was given other memory (.data = ...), but its memory is the parallel module's. "
                           f"Write into it: p.data.copy_(new), where new is the whole tensor or a DTensor")
        if new.shape != self.shape or new.dtype != self.dtype:
            raise RunError(f".data of{_called(self) or ' a tensor'} (a DTensor) is set to another shape or dtype; make a new "
                           f"tensor instead")
        with torch.no_grad():
            self.detach().copy_(new)

    @property
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def grad(self) -> Any:
        """The gradient, which computes as one tensor too."""
        found = _GRAD.__get__(self)
        if type(found) is DTensor:
            adopt(found, made_from(self))
        return found

    @grad.setter
    def grad(self, new: Tensor | None) -> None:
        if isinstance(new, Tensor) and new.shape == self.shape and not cut_alike(new, self):
            if not isinstance(new, DTensor):
                raise RunError(f"the gradient given to{_called(self) or ' a parameter'} is a plain tensor, the parameter is "
                               f"split or replicated over ranks: give torch.distributed.tensor.distribute_tensor(new, "
                               f"p.device_mesh, p.placements), or write into the one that is there: p.grad.copy_(new)")
            with torch.no_grad():
                new = _wrap(piece_like(new.detach(), self), self)
        _set_grad(self, new)

    @grad.deleter
    def grad(self) -> None:
        _set_grad(self, None)


def _set_grad(of: Tensor, new: Tensor | None) -> None:
    role = role_of(of)
    if role is not None and role.staged and not _within(_OURS):
        edits.written([of], edits.checksum("grad", (new,), {}))
    _GRAD.__set__(of, new)


def adopt(tensor: Tensor, role: Role | None) -> Tensor:
    """Make a DTensor ``Whole``, in place. A plain tensor is whole already."""
    if isinstance(tensor, DTensor):
        tensor.__class__ = Whole
        tensor.__dict__["_role"] = role
    return tensor


def let_optimizers_know() -> None:
    """Torch's optimizers choose fast variants by the exact type of parameters, from lists to which DTensor adds itself."""
    fast: tuple[Any, ...] = _fast_in_optimizers, _fast_in_utilities
    for known in fast:
        if Whole not in known:
            known.append(Whole)


def let_anomalies_be_found() -> None:
    """``torch.autograd.detect_anomaly`` asks whether a gradient is NaN anywhere, which DTensor cannot say of pieces."""
    register_sharding(torch.ops.aten._is_any_true.default)(lambda x: [([Replicate()], [Replicate()])])


def plain(tensor: Tensor) -> Tensor:
    """The whole tensor, as a plain one on every rank."""
    return whole_of(tensor) if isinstance(tensor, DTensor) else tensor


def cut_as(parameter: Tensor) -> Any:
    """A hook for the gradients that reach a parameter by a user's own backward: cut as the parameter is, as the program's."""
    mesh, placements, shape = parameter.device_mesh, parameter.placements, parameter.shape  # type: ignore[attr-defined]

    def hook(grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor) or grad.placements == placements:
            return grad
        whole = dtensor_of(whole_of(grad), mesh, [Replicate()] * mesh.ndim, shape)
        return dtensor_of(local_piece(whole.redistribute(placements=placements)), mesh, placements, shape)

    return hook


def made_from(tensor: Tensor) -> Role | None:
    """The role of what is made from a tensor."""
    role = role_of(tensor)
    return None if role is None else role.made()


# --- the way of an operator ---------------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operator. Its way follows from shapes and placements alone, so that all ranks take the same. A compiled function that
    goes back through a loss would have this traced, where an operator runs in the backward."""
    tensors: list[Tensor] = []
    _over(tensors.append, args, kwargs)
    refuse_collective(func, tensors)
    written, name, tags = written_by(func, args, kwargs), _name(func), _tags(func)
    by_item = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
    role = _role_of_result(func, name, tensors, by_item)
    edit = role is not None and role.staged and not _within(_OURS)
    if role is not None and edit and not by_item:
        role = role.made(edits.checksum(name, args, kwargs))
        edits.written(written, role.how)
    refuse_writing(func, written)
    if torch.Tag.inplace_view in tags and any(isinstance(x, DTensor) for x in written):
        return _turned(func, name, args, kwargs)
    if torch.Tag.nondeterministic_seeded in tags:
        result = gathered(func, args, kwargs, tensors, written, drawn=True)
    elif name in _REDUCED and (what := reduction(name, func, args, kwargs)) is not None:
        result = reduced(**what)
    elif name == "_foreach_norm":
        result = [torch.linalg.vector_norm(x, *args[1:2], **kwargs) for x in args[0]]
    elif by_item:
        result = _each(func, args, kwargs, written)
    elif (name in _ALIKE or name == "view") and (made := _alike(func, name, args, kwargs)) is not None:
        result = made
    elif name in _ALIKE or is_view(func):
        result = _native(func, args, kwargs, tensors)
    elif (torch.Tag.pointwise in tags or name in _POINTWISE) and (lead := _lead(tensors, written)) is not None:
        pieces = _over(lambda x: piece_like(x, lead), args, kwargs)
        result = func(*pieces[0], **pieces[1])
        if not written:
            result = _wrap(result, lead) if isinstance(result, Tensor) else pytree.tree_map_only(
                Tensor, lambda x: _wrap(x, lead), result)
    else:
        result = gathered(func, args, kwargs, tensors, written)
    if edit and by_item:
        _edited(name, args, kwargs, written, result)
    for x in written:
        if "_of" in x.__dict__:
            increment_version(local_piece(x.__dict__["_of"]))
    if written:
        return {0: None, 1: written[0]}.get(len(func._schema.returns), tuple(written))
    if type(result) is Whole and not by_item:
        return adopt(result, role)
    return pytree.tree_map_only(DTensor, lambda x: x if by_item else adopt(x, role), result)


_ALIKE = frozenset({"detach", "alias", "clone", "_to_copy", "lift_fresh", "zeros_like", "ones_like", "empty_like", "full_like"})
"""Operators of one tensor whose result is cut as it is."""
_POINTWISE = frozenset({"copy_", "fill_", "zero_", "masked_fill", "masked_fill_"})
_REDUCED = frozenset({"sum", "mean", "norm", "linalg_vector_norm"})


def _role_of_result(func: Any, name: str, tensors: Sequence[Tensor], by_item: bool) -> Role | None:
    """The role of what comes out. Raises RunError where a rank that holds one stage would compute what one process does not."""
    known = [role for x in tensors if (role := role_of(x)) is not None]
    roles = {role.name: role for role in known if role.staged}
    if not roles:
        return known[0].made() if known else None
    first, what = next(iter(roles)), ""
    if name in ("stack", "cat") or (len(roles) > 1 and not by_item):
        what = f"{func} joins what was made from {', '.join(map(repr, sorted(roles)[:2]))} and others"
    elif name.startswith("_amp_foreach"):
        what = "a GradScaler asks whether all gradients are finite"
    if what:
        raise RunError(f"{what}: in a pipeline a rank holds the parameters of its own stages, and every stage would get "
                       f"another result. For norms call parallel.clip_grad_norm_(max_norm), which is of all stages; an "
                       f"optimizer that joins parameters (LBFGS) needs a plan without a pipeline (pins={{'pp': 1}})")
    if name == "_local_scalar_dense" and not _within(_OPTIMIZERS):
        warnings.warn(StageWarning(f"a number was taken out of what was made from {first!r}. In a pipeline a rank holds the "
                                   f"parameters of its own stages: what is added up of such numbers, or decided by them, is of "
                                   f"these alone, and another thing on every stage. The norm of all gradients is "
                                   f"parallel.clip_grad_norm_(float('inf')); other sums over all parameters need the "
                                   f"numbers of all ranks, or a plan without a pipeline (pins={{'pp': 1}})"), stacklevel=2)
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise RunError(f"{func} on {first!r}: in a pipeline every stage would draw the same random numbers for other "
                       "parameters (from a generator= too, which several may share). Initialize the model before "
                       "autoparallel, or give load_state_dict whole tensors")
    return roles[first].made()


def _edited(name: str, args: Any, kwargs: Any, written: Sequence[Tensor], result: Any) -> None:
    """Remember of an operator on lists what it did to each item."""
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    for i in range(len(lists[0])):
        how = edits.checksum(name, *_item(i, lists, args, kwargs))
        edits.written(written[i:i + 1], how)
        made = result[i] if isinstance(result, list | tuple) and i < len(result) else None
        if not written and isinstance(made, Whole) and (role := role_of(made)) is not None:
            adopt(made, role.made(how))


_OPTIMIZERS = "torch.optim."
_HERE = (__name__, "meshwright.runtime.state.reading")
"""Where every operator comes through."""
_OURS = (_OPTIMIZERS, "torch.autograd.", "meshwright.runtime.")


def _within(names: str | tuple[str, ...]) -> bool:
    """Whether one of torch's optimizers asks, which does so for each parameter by itself, or another of ``names``."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(names) and name not in _HERE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _over(fn: Callable[[Tensor], Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """(args, kwargs) with ``fn`` of every tensor; without a tree walk where there is no tree, which is nearly always."""
    if any(isinstance(arg, list | tuple | dict) for arg in (*args, *kwargs.values())):
        found: tuple[Any, Any] = pytree.tree_map_only(Tensor, fn, (args, kwargs))
        return found
    return (tuple(fn(arg) if isinstance(arg, Tensor) else arg for arg in args),
            {key: fn(arg) if isinstance(arg, Tensor) else arg for key, arg in kwargs.items()})


@cache
def _name(func: Any) -> str:
    """An operator's, without its overload's."""
    return str(func.overloadpacket.__name__)


@cache
def _tags(func: Any) -> frozenset[Any]:
    """What torch says of an operator, which it asks its dispatcher for each time."""
    return frozenset(func.tags)


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """(place, name) of the operands that an operator changes."""
    return tuple((place, argument.name) for place, argument in enumerate(func._schema.arguments)
                 if argument.alias_info is not None and argument.alias_info.is_write)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The operands that the operator changes."""
    found: list[Tensor] = []
    for place, name in _writes(func):
        given = args[place] if place < len(args) else kwargs.get(name)
        found += [x for x in (given if isinstance(given, list | tuple) else (given,)) if isinstance(x, Tensor)]
    return found


def _called(x: Tensor) -> str:
    role = role_of(x)
    return f" ({role.name!r})" if role is not None else ""


# --- elementwise --------------------------------------------------------------------------------------------------------


def _lead(tensors: Sequence[Tensor], written: Sequence[Tensor]) -> DTensor | None:
    """The operand that has the shape of the result, which the others are cut like; None if none has."""
    lead = written[0] if written else max((x for x in tensors if isinstance(x, DTensor)), key=_size)
    if not isinstance(lead, DTensor) or is_pending(lead):
        return None
    shape = lead.shape
    if any(x.shape != shape and x.ndim for x in tensors) and torch.broadcast_shapes(*(x.shape for x in tensors)) != shape:
        return None
    return lead


def _size(x: DTensor) -> tuple[int, int, int]:
    """By what the lead is chosen: the largest, and among equals the one that is cut most."""
    return x.ndim, x.numel(), sum(map(is_cut, x.placements))


def _alike(func: Any, name: str, args: Any, kwargs: Any) -> DTensor | None:
    """What one of ``_ALIKE`` makes, or a view of the same shape, of the operand's piece alone: a fraction of what DTensor's own
    dispatch costs. None unless it lies in memory as the operand does, on the same device, and nothing is pending."""
    x, given = args[0], args[1:]
    if (not isinstance(x, DTensor) or is_pending(x) or not x.is_contiguous() or kwargs.get("device") not in (None, x.device)
            or kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format)):
        return None
    local = local_piece(x)
    if name == "view":
        if tuple(given[0]) != tuple(x.shape):
            return None
        given = (local.shape,)
    made = _wrap(func(local, *given, **kwargs), x)
    mark_copies(func, x, made)
    return made


def _wrap(local: Tensor, lead: DTensor) -> DTensor:
    """What was computed elementwise from the pieces of ``lead``; made from the same parameter."""
    if local.dtype == lead.dtype:  # the same spec, without DTensor.from_local's autograd function
        made = DTensor(local, lead._spec, requires_grad=local.requires_grad)
    else:
        made = DTensor.from_local(
            local, lead.device_mesh, lead.placements, run_check=False, shape=lead.shape, stride=lead.stride())
    return adopt(made, made_from(lead))  # type: ignore[return-value]


def _each(func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
    """An operator on lists, elementwise item by item: once on the pieces, or one by one where it is not on pieces."""
    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    lists = [arg for arg in given if any(isinstance(x, Tensor) for x in arg)]
    columns = [[x for x in items if isinstance(x, Tensor)] for items in zip(*lists, strict=False)]
    leads = [_lead(items, items[:1] if written else ()) if _distributed(items) else items[0] for items in columns]
    if any(lead is None for lead in leads):
        if len(leads) == 1:
            return gathered(func, args, kwargs, columns[0], written)
        results = [_run(func, *_item(i, lists, args, kwargs)) for i in range(len(leads))]
        return None if written else [x for result in results for x in result]

    def pieces(arg: Any) -> Any:
        if any(arg is one for one in lists):
            return [piece_like(x, lead) if isinstance(lead, DTensor) else x for x, lead in zip(arg, leads, strict=False)]
        return whole_of(arg) if isinstance(arg, DTensor) else arg

    result = func(*map(pieces, args), **{key: pieces(arg) for key, arg in kwargs.items()})
    if not isinstance(result, list | tuple):
        return result
    return [_wrap(x, lead) if isinstance(lead, DTensor) else x for x, lead in zip(result, leads, strict=True)]


def _distributed(tensors: Sequence[Tensor]) -> bool:
    return any(isinstance(x, DTensor) for x in tensors)


def _item(i: int, lists: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with the i-th item of every list alone."""
    count = len(lists[0])

    def alone(arg: Any) -> Any:
        return [arg[i]] if isinstance(arg, list | tuple) and len(arg) == count else arg

    return tuple(map(alone, args)), {key: alone(arg) for key, arg in kwargs.items()}


# --- views, and the whole -----------------------------------------------------------------------------------------------


@cache
def is_view(func: Any) -> bool:
    """Whether what an operator gives shares memory with what it is given."""
    return any(back.alias_info is not None and not back.alias_info.is_write for back in func._schema.returns)


def _native(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
    """As DTensor does it, or on the whole where it cannot. A view whose cut is undone for it is a copy, and marked as one."""
    of = next(x for x in tensors if isinstance(x, DTensor))
    if func is torch.ops.aten.view_as_real.default:  # of a piece: another dim at the end
        return dtensor_of(func(local_piece(of)), of.device_mesh, of.placements, (*of.shape, 2))
    plain = pytree.tree_map_only(DTensor, torch_dtensor, (args, kwargs))
    try:
        result, copied = func(*plain[0], **plain[1]), False
    except (RuntimeError, NotImplementedError):  # a dim that does not divide, say; known from the shapes, on all ranks
        result, copied = gathered(func, args, kwargs, tensors, ()), True
    if isinstance(result, DTensor) and not copied:
        edits.before_sending(of, [dim for dim, (a, b) in enumerate(zip(of.placements, result.placements, strict=True))
                                  if is_cut(a) and not is_cut(b)])
    mark_copies(func, of, result, copied)
    return result


def _turned(func: Any, name: str, args: Any, kwargs: Any) -> DTensor:
    """A view that takes the place of what it views (``unsqueeze_``; ``torch.quantile`` does it to what it has sorted). Raises
    RunError for a tensor that a parallel module holds, and for views that say where memory lies."""
    x: DTensor = args[0]
    role = role_of(x)
    if name not in _TURNED or (role is not None and role.held == id(x)):
        raise RunError(f"{func} would change the shape of a DTensor{_called(x)} in place. Take .full_tensor() first, "
                       f"on every rank, or the operator without '_'")
    view = getattr(torch.ops.aten, name.removesuffix("_"))(*args, **kwargs)
    x._local_tensor, x._spec = local_piece(view), view._spec
    x.__dict__["_copied"] = view.__dict__["_copied"]
    with no_dispatch():  # the sizes of the DTensor itself
        func(*args, **kwargs)
    return x


_TURNED = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_"})


def mark_copies(func: Any, of: DTensor, result: Any, copied: bool = False) -> None:
    """Remember of views that they are copies: ``copied``, or the cut of what they view was undone for them."""
    if is_view(func):
        for x in pytree.tree_leaves(result):
            if isinstance(x, DTensor):
                x.__dict__ |= {"_of": of.__dict__["_of"]} if "_of" in of.__dict__ else {}
                undone = any(is_cut(a) and not is_cut(b) for a, b in zip(of.placements, x.placements, strict=True))
                x.__dict__["_copied"] = copied or undone or bool(of.__dict__.get("_copied"))


def refuse_collective(func: Any, tensors: Sequence[Tensor]) -> None:
    """Raise RunError for what sends tensors between processes: these are whole already, and stages have different ones."""
    if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
        raise RunError(f"{func} is called on a tensor{_called(tensors[0])} of a parallel module, which is the whole one on "
                       f"every rank already, as one process has it: gradients are summed, outputs are of the whole batch. Take "
                       f"the call (of torch.distributed) out, or give it a plain tensor: x.full_tensor() on every rank")


def refuse_writing(func: Any, changed: Sequence[Tensor]) -> None:
    """Raise RunError where one of the tensors is a copy that stands for a view."""
    for x in changed:
        if x.__dict__.get("_copied"):
            raise RunError(f"{func} would write into a view of a split tensor{_called(x)}, and this view is a copy. Write into "
                           f"the tensor itself, by an operator on all of it: torch.where, masked_fill_, index_fill_, copy_")


def gathered(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor], written: Sequence[Tensor], drawn: bool = False
) -> Any:
    """On the whole tensors, on every rank. ``drawn``: what comes out is random, and the first rank's."""
    lead = next(x for x in tensors if isinstance(x, DTensor))
    mesh, wholes = lead.device_mesh, dict[int, Tensor]()

    def whole(x: Tensor) -> Tensor:
        if id(x) not in wholes:
            if isinstance(x, DTensor):
                wholes[id(x)] = whole_of(x)
            else:
                wholes[id(x)] = x if not x.ndim or any(x is one for one in written) else of_first(x, lead)
        return wholes[id(x)]

    full = pytree.tree_map_only(Tensor, whole, (args, kwargs))
    result = func(*full[0], **full[1])
    for x in written:
        if isinstance(x, DTensor):
            new = of_first(wholes[id(x)], x) if drawn else wholes[id(x)]
            mine, local = piece_of(new, x), local_piece(x)
            if mine.untyped_storage().data_ptr() != local.untyped_storage().data_ptr():  # of a replicated one: written already
                local.copy_(mine)
    if written:
        return None
    everywhere = [Replicate()] * mesh.ndim
    return pytree.tree_map_only(
        Tensor, lambda x: dtensor_of(of_first(x, lead) if drawn else x, mesh, everywhere, x.shape), result
    )
