"""In-place operators of an export, made functional where that is plain to see.

    %1 = zeros_like(%0); %2 = scatter_(%1, ..)                  ->  %2 = scatter(%1, ..), and from here on %2 for %1
    %1 = new_empty(%0); %2 = slice(%1, ..); copy_(%2, %3)       ->  slice_scatter(%1, copy(%2, %3), ..), likewise

torch can do this for every program (``run_decompositions``), by a second trace that takes longer than the first. Most in-place
operators of a forward write into a tensor that was made a line before, so that nothing else can see the write. Plain is: the
tensor, or the one it is a slice of, was made by an operator that shares no memory with what it reads, no other view of it
is read afterwards, and the functional operator gives the same shape and dtype. What is not plain is left to torch.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from meshwright.ir.graph import GraphError
from meshwright.ir.operators import overload

PIECES: Mapping[str, str] = {
    "aten.slice.Tensor": "aten.slice_scatter.default", "aten.select.int": "aten.select_scatter.default",
}
"""View of a piece -> the operator that writes the piece back."""


def make_functional(graph: fx.Graph) -> fx.Graph | None:
    """The graph without in-place operators, as a copy; None if one of them is not plain to replace."""
    made = fx.Graph()
    result = made.graph_copy(graph, {})
    made.output(result)
    made.find_nodes(op="output")[0].meta = dict(graph.find_nodes(op="output")[0].meta)
    order = {node: at for at, node in enumerate(made.nodes)}
    for node in [node for node in made.nodes if _writes(node)]:
        found = _Write(node, order).found()
        if found is None:
            return None
        found.rewrite(made)
        order |= dict.fromkeys(found.added, order[node])  # they stand where the write stood
    return made


@dataclass
class _Write:
    """One in-place operator: ``views`` lead from the tensor that was made to the operand that is written."""

    node: fx.Node
    order: dict[fx.Node, int]
    views: list[fx.Node] = field(default_factory=list)
    added: list[fx.Node] = field(default_factory=list)

    def found(self) -> _Write | None:
        """The write, if it is plain."""
        target = self.node.target
        assert isinstance(target, torch._ops.OpOverload)
        alike = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}.isdisjoint(target.tags)
        base = self.node.args[0] if self.node.args else None
        if not alike or not isinstance(base, fx.Node) or self._functional() is None:
            return None
        while str(base.target) in PIECES:
            self.views.insert(0, base)
            base = base.args[0]
            assert isinstance(base, fx.Node)
        self.base = base
        if self.views and self.node.users:  # the result is a view of the whole, which may be written again
            return None
        return self if _fresh(base) and not self._seen_elsewhere() and self._same_type() else None

    def _functional(self) -> Any:
        """The operator that gives what this one writes into its first operand, and writes nothing."""
        schema = self.node.target._schema  # type: ignore[union-attr]
        name, _, kind = str(self.node.target).rpartition(".")
        written = [argument for argument in schema.arguments if argument.alias_info is not None]
        if not name.endswith("_") or name.endswith("__") or len(written) != 1 or written[0] is not schema.arguments[0]:
            return None
        try:
            functional = overload(f"{name.removesuffix('_')}.{kind}")
        except GraphError:
            return None
        mine = [(argument.name, str(argument.real_type)) for argument in schema.arguments]
        same = mine == [(argument.name, str(argument.real_type)) for argument in functional._schema.arguments]
        return functional if same and not functional._schema.is_mutable else None

    def _seen_elsewhere(self) -> bool:
        """Whether a view that was taken of the tensor before is read afterwards."""
        todo, at = [self.base], self.order[self.node]
        while todo:
            views = [user for user in todo.pop().users if self.order[user] < at and _may_share(user)]
            for view in views:
                mine = (self.node, *self.views) if view in self.views else ()
                if any(self.order[reader] >= at and reader not in mine for reader in view.users):
                    return True
            todo += views
        return False

    def _same_type(self) -> bool:
        """Whether the functional operator gives the shape and dtype of what is written (in-place operators cast)."""
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), lambda node: node.meta.get("val"))
        val = args[0]
        mode = detect_fake_mode((args, kwargs))
        if mode is None or not isinstance(val, torch.Tensor):
            return False
        with mode, torch.no_grad():
            out = self._functional()(*args, **kwargs)
        return bool(out.shape == val.shape and out.dtype == val.dtype)

    def rewrite(self, graph: fx.Graph) -> None:
        """Replace it."""
        node = self.node
        with graph.inserting_before(node):
            new = self._call(graph, self._functional(), node.args, node.kwargs, node.args[0])
            whole = new
            for view in reversed(self.views):
                args = (view.args[0], whole, *view.args[1:])
                whole = self._call(graph, overload(PIECES[str(view.target)]), args, view.kwargs, view.args[0])
        later = [user for user in self.base.users if self.order.get(user, -1) > self.order[node]]
        for user in later:
            user.replace_input_with(self.base, whole)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _call(self, graph: fx.Graph, called: Any, args: Any, kwargs: Any, like: Any) -> fx.Node:
        made = graph.call_function(called, args, kwargs)
        made.meta = {**self.node.meta, "val": like.meta["val"]}
        self.added.append(made)
        return made


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and (
        str(node.target) != "aten.detach_.default")


def _fresh(node: fx.Node) -> bool:
    """Whether the value shares memory with no other."""
    while node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if any(user is not node and user.args[1:] == node.args[1:] for user in source.users):
            return False
        node = source
    return node.op == "call_function" and not _may_share(node)


def _may_share(node: fx.Node) -> bool:
    """Whether a result may share memory with an operand: its schema says so, or it is made of other operators, which may."""
    target = node.target
    if target is operator.getitem:
        return _may_share(node.args[0])  # type: ignore[arg-type]
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return True
    made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    return made_of_others or any(value.alias_info is not None for value in (*target._schema.returns, *target._schema.arguments))
