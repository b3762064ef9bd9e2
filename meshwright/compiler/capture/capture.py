"""Capture: from an unmodified module and example inputs to a ``Graph`` in normal form.

    model --shadow--> fake model --torch.export--> export IR --import--> Graph --normalize--> Graph

``shadow`` traces without memory, ``importer`` reads the export, ``normalize`` gives the one spelling that rules are written
for, ``meshwright.ir.signature`` says how a call binds to the graph. The graph computes what the module computes in the given
mode at the given (global) shapes, with these limits: outputs that are no tensors, numbers or containers of them (key/value
caches) are None, and activation checkpointing in the model is gone (it is the planner's choice). With ``loss_fn`` the graph's
output is the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from meshwright.compiler.capture.exported.importer import import_graph
from meshwright.compiler.capture.normalize import normalize
from meshwright.compiler.capture.rewrite import mark_differentiable
from meshwright.compiler.capture.shadow import (
    ModelTensor,
    Numbers,
    Traced,
    behind,
    failing_frame,
    failing_function,
    fake_inputs,
    make_shadow,
    model_tensors,
    move,
    trace,
)
from meshwright.compiler.capture.sharing import check_graph, check_strays, one_memory
from meshwright.compiler.capture.watch import IN_FUNCTION
from meshwright.errors import CaptureError, NotKeptError
from meshwright.ir.gradients.hooks import lost_hooks
from meshwright.ir.graph import Graph, Ref
from meshwright.ir.serialize import graph_digest
from meshwright.ir.signature import describe, name_arguments


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    compute_dtype: torch.dtype | None = None,
    training: bool = True,
    functional: bool = False,
) -> Graph:
    """The graph of ``model(*args, **kwargs)``, or of ``loss_fn(model(*args, **kwargs), *targets)``.

    The arguments are examples: only their shapes and dtypes count; weights and arguments may be on the meta device. The model
    is left as it is. ``compute_dtype``: floating parameters and arguments are read in this dtype.
    ``functional``: spelled as a graph is that changes something in place. Raises InputError if the
    arguments do not fit the forward, CaptureError (module, source line, what to do) if it is not one static graph.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(f"{name!r} has no shape yet, its module is a lazy one. What to do: call the model once on an "
                               f"example before", module=name.rpartition(".")[0])
    modules = [model, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    for hook in (hook for module in modules for hook in lost_hooks(module)):
        raise CaptureError(f"{hook}, which would not run: the parallel module runs the model's graph. What to do: "
                           f"{hook.remedy}")
    signature, leaves = describe(model.forward, args, kwargs, targets)
    named = name_arguments(signature, args, kwargs)
    owned, fixed = one_memory(model_tensors(model))

    strays: list[torch.Tensor] = []
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    shadow = make_shadow(model, owned, mode, compute_dtype, training, strays)
    check_strays(model, owned, strays)

    def once(moved: Numbers) -> tuple[Graph, Numbers]:
        """The graph of the next call of the shadow: a call's hooks stay on it, its plain values are what an export undoes."""
        move(shadow, moved)
        try:
            traced = trace(shadow, fake_inputs(leaves, mode), signature, named, len(args), loss_fn, compute_dtype, owned)
        except Exception as error:
            raise _explain(error, model, shadow) from error
        graph = _imported(traced, owned, _leaf_names(signature), functional)
        check_graph(graph, owned, fixed)
        graph = _with_loss(graph, traced, loss_fn)
        _check_attributes(graph, owned)
        _check_assigned(graph, traced.assigned)
        found = replace(graph, signature={**signature, "output": traced.type_}, classes=traced.classes)
        return normalize(found), traced.moved

    graph, moved = once({})
    _check_names(graph)
    state, digest = moved, graph_digest(graph)
    while state:
        later, moved_then = once(state)
        if graph_digest(later) != digest:
            what, now = next(iter(moved.items()))
            name = ".".join(str(part) for part in what if part != "")
            raise CaptureError(
                f"the forward changes {name!r} of the model (to {now!r:.40}), which is no tensor, and computes something else "
                f"afterwards: a graph would compute what it does now forever. What to do: keep it in a buffer "
                f"(register_buffer), which the graph changes too, or change it outside of the forward", module=what[0])
        state = _far(state, moved_then) if state is moved else {}
    return graph


def _check_names(graph: Graph) -> None:
    """A plan's tables, its page and the files of other programs (GraphML) name modules, parameters and inputs."""
    for name in (*graph.inputs, *(fqn for param in graph.params for fqn in param.fqns), *(op.module for op in graph.ops)):
        if not name.isprintable():
            raise CaptureError(
                f"the name {name!r} has a character that cannot be printed (one that controls a terminal, or that hides or "
                f"turns text), and tables, files and pages of plans have the names of modules, parameters and inputs. What to "
                f"do: rename it")


def _far(one: Numbers, two: Numbers) -> Numbers:
    """What counts on from one call to the next, as the millionth call would find it; nothing if nothing does."""
    steps = {path: two[path] - value for path, value in one.items()
             if type(value) in (int, float) and type(two.get(path)) is type(value)}
    return {**one, **{path: one[path] + 999_998 * step for path, step in steps.items()}} if any(steps.values()) else {}


def _imported(traced: Traced, owned: Sequence[ModelTensor], names: Sequence[str], functional: bool) -> Graph:
    try:
        return import_graph(traced, owned, names, functional)
    except AssertionError as error:  # torch.export's, which cannot say that one of two names was changed
        twins = [item.fqns for item in owned if item.buffer and len(item.fqns) > 1]
        if not twins:
            raise
        raise CaptureError(f"buffers {', '.join(map(repr, twins[0]))} are one tensor under several names, and the forward "
                           f"changes it: keep it under one name, or make the others a .clone()") from error


def _check_attributes(graph: Graph, owned: Sequence[ModelTensor]) -> None:
    """A tensor that a module keeps as a plain attribute is a constant of the graph, so it must not take a gradient."""
    learned = {item.fqns for item in owned if item.plain and item.tensor.requires_grad}
    names = {param.value: param.fqn for param in graph.params if param.fqns in learned}
    for op in graph.ops:
        for name in op.inputs:
            if name in names:
                raise CaptureError(
                    f"module {op.module or '(root)'!r} reads its attribute {names[name]!r}, a tensor that takes gradients and "
                    f"is no parameter: it would be a constant of the graph. What to do: make it an nn.Parameter, or compute it "
                    f"in the forward", module=op.module, source=op.source)


def _check_assigned(graph: Graph, assigned: frozenset[str]) -> None:
    """What the forward puts in a tensor's place is the next call's, so it must be a buffer's, and have no gradient."""
    names = {param.value: fqn for param in graph.params for fqn in param.fqns if fqn in assigned}
    for op in graph.ops:
        for name in op.inputs:
            if name in names and op.target == "aten.detach.default":  # which the export puts where something is written
                names.update(dict.fromkeys(op.outputs, names[name]))
            elif name in names and not op.target.startswith("aten.copy"):
                raise CaptureError(
                    f"module {op.module or '(root)'!r} reads {names[name]!r}, and the forward puts a tensor in its place that "
                    f"has a gradient, or is no buffer, for its next call. What to do: register it as a buffer, and .detach() "
                    f"what is assigned to it", module=op.module, source=op.source)


def _leaf_names(signature: Mapping[str, Any]) -> list[str]:
    names: list[str] = []

    def walk(spec: Any) -> None:
        if "tensor" in spec:
            names.append(spec["tensor"])
        items = spec.get("items", ())
        for item in items.values() if isinstance(items, Mapping) else items:
            walk(item)

    for spec in (*signature["bound"].values(), *signature["targets"]):
        walk(spec)
    return names


def _with_loss(graph: Graph, traced: Traced, loss_fn: Callable[..., Any] | None) -> Graph:
    """With ``Graph.loss``: what is called so, or else the one scalar of the output's items that a gradient flows through."""
    tree = graph.output_tree
    loss = tree.get("loss") if isinstance(tree, Mapping) else tree
    if loss is None or isinstance(loss, tuple | list):
        marked = mark_differentiable(graph).values
        items = [item for item in (tree.values() if isinstance(tree, Mapping) else tree) if isinstance(item, Ref)]
        scalars = [item for item in items if marked[item.name].shape == () and marked[item.name].differentiable]
        loss = scalars[0] if len(scalars) == 1 else None
    scalar = isinstance(loss, Ref) and graph.values[loss.name].shape == () and graph.values[loss.name].dtype.is_floating_point
    if loss_fn is not None and (not scalar or not isinstance(tree, Ref)):
        found = str(graph.values[tree.name]) if isinstance(tree, Ref) else f"a {type(tree).__name__}"
        raise CaptureError(f"loss_fn must return a scalar floating tensor (the loss), but gives {found}; reduce it, for "
                           f"example by .mean()")
    return replace(graph, loss=loss.name) if scalar and isinstance(loss, Ref) else graph


_FUNCTIONS: Mapping[str, str] = {
    "gaussian_nll_loss": "it looks for a negative variance; write it out: var = var + (var.clamp(min=eps) - var).detach(), "
                         "then (var.log() + (input - target) ** 2 / var).mean() / 2",
    "cov": "it looks at a number; write it out: x = x - x.mean(1, keepdim=True), then x @ x.mT / (x.shape[1] - 1)",
    "corrcoef": "it looks at a number; write it out: x = x - x.mean(1, keepdim=True), x = x / x.norm(dim=1, keepdim=True), "
                "then x @ x.mT",
    "ctc_loss": "what it makes depends on the lengths of the targets; let the model return the log probabilities, and call "
                "ctc_loss on what the parallel module returns (.full_tensor() is differentiable; without micro-batches and "
                "pipelines)",
    "trunc_normal_": "it draws anew until every number lies within the bounds (torch 2.11 does not); draw by the inverse: "
                     "low, high = (math.erf((bound - mean) / (std * 2**0.5)) for bound in (a, b)), then "
                     "x.uniform_(low, high).erfinv_().mul_(std * 2**0.5).add_(mean).clamp_(a, b)",
}
"""{function of torch that looks at the contents of tensors inside: what to do instead}."""


_REMEDIES = (
    (("chanceerror", "torch._c.generator"),
     "a graph would repeat or lose that: draw with torch (torch.rand, dropout) from its default generator, seed with "
     "torch.manual_seed before autoparallel, and choose layers at random by torch.where on a drawn tensor"),
    (("dynamicoutputshape",),
     "the shape of what it makes depends on the contents of a tensor: make it of a fixed size (torch.where or a mask in the "
     "place of a selection), or leave it out of the model and of loss_fn, and compute it from the outputs"),
    (("data-dependent", "datadependent", "unbacked", "_local_scalar_dense", "guardondata", ".item()"),
     "it branches on, or takes a number from, the contents of a tensor; use torch.where, or make it a Python argument. If a "
     "branch only raises for some inputs, torch._assert_async(condition, message) does, on every rank. A BatchNorm with "
     "momentum=None wants a momentum; a torch.distributions object that looks at its arguments wants validate_args=False. "
     "Layers that are left out at random (layer drop) want that probability to be 0, in a config layerdrop=0. If it is a loop "
     "over experts that asks which tokens are theirs: of a transformers model set experts_implementation="
     "\"grouped_mm\" (from_pretrained and from_config take it); of your own, sort the tokens by expert and use "
     "torch._grouped_mm, or compute every expert on all tokens"),
    (("attributeerror", "typeerror", "keyerror", "nameerror"),
     "the forward runs into this while it is traced. If it runs as it is, it does something else under torch.export (as code "
     "that asks torch.compiler.is_exporting() does): torch.export.export(model, args, kwargs, strict=False) shows the same. "
     "If what is missing is an input that it makes itself otherwise (an attention_mask, say), give it with the example"),
    (("expected inputs of bf16",),
     "torch traces grouped products of bfloat16 alone: give precision=\"bf16\", or take a version of transformers that has "
     "products of its own for other dtypes (5.5 or later)"),
    (("dtype", "same type"), "the dtypes of an operation's operands differ under this precision; cast them in the model"),
    (("mat1 and mat2", "size of tensor", "shape", "must match", "reduction dim", "size mismatch"),
     "the shapes do not fit: check the example inputs"),
)


def _explain(error: Exception, model: nn.Module, shadow: nn.Module) -> CaptureError:
    module, source = failing_frame(error, shadow)
    kept = next((one for one in behind(error) if isinstance(one, NotKeptError)), None)
    function = next((note.removeprefix(IN_FUNCTION) for one in behind(error) for note in getattr(one, "__notes__", ())
                     if note.startswith(IN_FUNCTION)), "")
    function = failing_function(error, _FUNCTIONS) or function
    inside = dict(model.named_modules()).get(module, model)
    where = f"module {module or '(root)'!r} ({type(inside).__name__})" + (f" at {source}" if source else "")
    if kept is not None:
        return CaptureError(f"{where}: {kept}. What to do: {kept.remedy}", module=module, source=source)
    text = str(error).strip().split("\n\n")[0].split("\n")
    reason = f"{type(error).__name__}: {' '.join(text)[:400]}"
    lowered = f"{type(error).__name__} {error}".lower()
    remedy = next((advice for words, advice in _REMEDIES if any(word in lowered for word in words)),
                  "the forward must be one static graph of tensor operations: check that it runs on these inputs as it is")
    if remedy in (advice for _, advice in _REMEDIES[:3]):
        remedy = _FUNCTIONS.get(function.rpartition(".")[2], remedy)
    reason = f"{function}: {reason}" if function else reason
    return CaptureError(f"{where} cannot be captured: {reason}. What to do: {remedy}", module=module, source=source)
