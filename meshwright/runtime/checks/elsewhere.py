"""An output of a training step that another stage of a pipeline has: it knows its shape and dtype, and any use of it says who
has the contents and what to do, where ``None`` would end in an AttributeError of Python's, or in a branch not taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from meshwright.errors import RunError
from meshwright.ir.graph import Ref
from meshwright.ir.mesh import PP
from meshwright.ir.program import Port, Program
from meshwright.ir.sharding import DTYPE_NAMES

_KNOWN = frozenset({
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.ndim.__get__, Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__repr__,
    torch.is_floating_point, torch.is_complex, torch.numel,
})
"""What may be asked: it follows from the plan."""


class Elsewhere(Tensor):
    """See the file's head. ``words``: what an error says."""

    words: str

    @classmethod
    def of(cls, port: Port, program: Program) -> Elsewhere:
        """In place of an output that this rank does not have."""
        assert program.stages is not None
        stage, mesh = program.stages.made[port.name], program.mesh
        at = program.stages.stage_rank[stage]
        ranks = [rank for rank in range(mesh.world) if mesh.coordinates(rank)[PP] == at]
        name = _path_of(program.output_tree, port.name) or port.name
        shown = f"{DTYPE_NAMES.get(port.dtype, port.dtype)}{list(port.shape)}"
        with unset_fake_temporarily():  # a fake tensor cannot be of a class of ours
            found: Elsewhere = torch.empty(port.shape, dtype=port.dtype, device="meta").as_subclass(cls)
        found.words = (
            f"output {name!r} ({shown}) of this training step is made by stage {stage} of the pipeline, on ranks {ranks}; "
            f"rank {program.rank} does not have it: a training step sends only numbers (the loss) to every rank. What to do: "
            f"use it on those ranks alone (elsewhere it is a meshwright.Elsewhere); or make what you want of it a number, in "
            f"the model or in loss_fn=, which every rank gets; or call under torch.no_grad(), where every rank gets all outputs"
        )
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What follows from the plan; anything else raises RunError."""
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.detach:
            return args[0]
        raise RunError(next(x.words for x in _tensors((*args, *(kwargs or {}).values())) if isinstance(x, Elsewhere)))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RunError(self.words)

    full_tensor = to_local = redistribute = _refuse
    placements = device_mesh = property(_refuse)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Where it is."""
        return f"Elsewhere({self.words.partition('; ')[0]})"


def _tensors(given: Iterable[Any]) -> Iterable[Any]:
    for one in given:
        if isinstance(one, list | tuple):
            yield from _tensors(one)
        else:
            yield one


def _path_of(tree: Any, name: str) -> str | None:
    """The user's name of an output: "logits", "hidden_states[2]"; None for the only one."""
    if isinstance(tree, Ref):
        return "" if tree.name == name else None
    items = [(f".{key}", item) for key, item in tree.items()] if isinstance(tree, Mapping) else \
        [(f"[{i}]", item) for i, item in enumerate(tree)] if isinstance(tree, list | tuple) else []
    for key, item in items:
        if (found := _path_of(item, name)) is not None:
            return f"{key}{found}".removeprefix(".")
    return None
