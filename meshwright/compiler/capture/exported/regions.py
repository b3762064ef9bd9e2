"""Regions of the export that run under ``no_grad`` or without autocast: their nodes in their place, as the model means them.

What a region reads enters through a ``detach``. What it returns of that unchanged (``h.float()`` of float32) is in the model
the very tensor that it read, and so it is here: it keeps its gradient outside. What a region writes into keeps the gradient of
what it was, which a graph of functions cannot say, so that is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_aggregate

from meshwright.compiler.capture.shadow import WRAPPED, is_user_file
from meshwright.errors import CaptureError

SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_CUTS = frozenset({torch.ops.aten.detach.default, torch.ops.aten.detach_.default, torch.ops.aten.view.dtype})
"""Views that end a gradient."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def inline_regions(module: fx.GraphModule) -> None:
    """Replace ``no_grad`` and disabled ``autocast`` regions by their nodes, in place."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in (SET_GRAD, AUTOCAST):
            switched_off = node.target is SET_GRAD and not node.args[0]
            if node.target is AUTOCAST and node.args[2]:
                continue
            at = 1 if node.target is SET_GRAD else 4
            _inline(module, node, node.args[at], node.args[at + 1:], switched_off)


def _inline(module: fx.GraphModule, call: fx.Node, place: fx.Node, operands: Any, detach: bool) -> None:
    graph, body = module.graph, getattr(module, str(place.target))
    inline_regions(body)
    given = dict(zip([n for n in body.graph.nodes if n.op == "placeholder"], operands, strict=True))
    env: dict[fx.Node, Any] = dict(given)
    with graph.inserting_before(call):
        for hole, operand in given.items():
            val = hole.meta.get("val")
            if detach and isinstance(val, torch.Tensor) and val.is_floating_point():
                env[hole] = graph.call_function(torch.ops.aten.detach.default, (operand,))
                env[hole].meta = {**call.meta, "val": val}
        for node in body.graph.nodes:
            if node.op == "get_attr" and not hasattr(module, node.target):
                setattr(module, node.target, getattr(body, node.target))
            if node.op in ("get_attr", "call_function"):
                env[node] = graph.node_copy(node, env.__getitem__)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda node: given.get(_itself(node), env[node]))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])  # a region returns a tuple, read by getitem only
        graph.erase_node(user)
    graph.erase_node(call)
    if not place.users:
        graph.erase_node(place)


def show_aliases(graph: fx.Graph) -> None:
    """Where something is written: what gives the very tensor that it is given (a dropout of nothing) is that tensor, for a
    write into one is a write into the other. Raises CaptureError where an operator gives a view, without its schema saying so
    (an einsum that turns), and either is read after the other was written into."""
    hidden: dict[fx.Node, set[fx.Node]] = {}
    for node in list(graph.nodes) if any(map(_written_by, graph.nodes)) else []:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.is_view or target._schema.is_mutable:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
            continue
        probes = {one: _probe(one) for one in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), probes.__getitem__)
        try:
            made = target(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # of other devices: nothing that gives its operand
            continue
        given = {one: probe for one, probe in probes.items() if isinstance(probe, torch.Tensor)}
        same = next((one for one, probe in given.items() if made is probe), None)
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif isinstance(made, torch.Tensor) and any(_one_memory(made, probe) for probe in given.values()):
            hidden[node] = {_base(one) for one in given}
    for node, bases in hidden.items():
        _refuse_seen_writes(graph, node, bases)


def _one_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _refuse_seen_writes(graph: fx.Graph, view: fx.Node, bases: set[fx.Node]) -> None:
    """Raise CaptureError where ``view`` is written into and ``bases`` are read afterwards, or the other way round."""
    place = {node: at for at, node in enumerate(graph.nodes)}
    sides = [[node for node in graph.nodes if _base(node) in side] for side in ({view}, bases)]
    for written, (mine, others) in ((node, pair) for node in graph.nodes for pair in (sides, sides[::-1])):
        if not any(one in mine for one in _written_by(written)):
            continue
        if any(place[user] > place[written] for other in others for user in other.users):
            module, source = module_path(view), source_of(view.meta.get("stack_trace") or "")
            raise CaptureError(f"module {module or '(root)'!r} ({source}): {view.target} gives a view of what it is given; "
                               f"one of the two is written into, and the other read afterwards, which a graph of functions "
                               f"does not see. What to do: make a new tensor instead of writing, or take a .clone()",
                               module=module, source=source)


def _written_by(node: fx.Node) -> list[fx.Node]:
    """The operands whose contents an operator changes."""
    target = node.target
    contents = isinstance(target, torch._ops.OpOverload) and torch.Tag.inplace_view not in target.tags
    if not contents or not target._schema.is_mutable:  # type: ignore[union-attr]
        return []
    specs = target._schema.arguments  # type: ignore[union-attr]
    pairs = [*zip(specs, node.args, strict=False), *((spec, node.kwargs.get(spec.name)) for spec in specs)]
    return [one for spec, one in pairs if spec.is_write and isinstance(one, fx.Node)]


def refuse_cut_writes(program: ExportedProgram) -> None:
    """Raise CaptureError where something is written through ``.detach()`` or ``.data`` into a tensor that has a gradient and is
    read again: what is read has new contents, and the gradient of the old ones."""
    learned = {spec.arg.name for spec in program.graph_signature.input_specs
               if spec.kind is InputKind.PARAMETER and _trained(program, spec.target)}
    place = {node: at for at, node in enumerate(program.graph.nodes)}
    learns: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.name in learned or (node.target not in _CUTS and learns.intersection(node.all_input_nodes)):
            learns.add(node)
    for node in program.graph.nodes:
        for one in _written_by(node):
            base, cut = one, False
            while (before := _shown(base)) is not None:
                cut = cut or (base.target in _CUTS and before in learns)
                base = before
            same = [other for other in learns if cut and _base(other) is base]
            if any(place[user] > place[node] for other in same for user in other.users):
                module, source = module_path(node), source_of(node.meta.get("stack_trace") or "")
                raise CaptureError(f"module {module or '(root)'!r} ({source}) writes by {node.target} through .detach() or "
                                   f".data into a tensor that has a gradient and is read again: its gradient would be lost. "
                                   f"What to do: make a new tensor instead of writing, such as h = h + (new - h).detach()",
                                   module=module, source=source)


def refuse_writes(program: ExportedProgram) -> None:
    """Raise CaptureError where something is written under ``no_grad`` into a tensor that has a gradient: what is read of it
    then has the gradient of what it was, which no graph of functions says."""
    specs = program.graph_signature.input_specs
    learned = {spec.arg.name for spec in specs if spec.kind is InputKind.PARAMETER and _trained(program, spec.target)}
    learns: set[fx.Node] = set()
    for node in program.graph.nodes:
        cut = node.target is torch.ops.aten.detach.default
        if node.name in learned or (not cut and learns.intersection(node.all_input_nodes)):
            learns.add(node)
        if node.target is not SET_GRAD or node.args[0]:
            continue
        learns.discard(node)
        body = getattr(program.graph_module, str(node.args[1].target))
        for written in _written(body, list(node.args[2:]), learns):
            module, source = module_path(written), source_of(written.meta.get("stack_trace") or "")
            raise CaptureError(f"module {module or '(root)'!r} ({source}) writes by {written.target} under torch.no_grad() "
                               f"into a tensor that has a gradient, which would be lost. What to do: make a new tensor "
                               f"instead of writing, such as h = h + (new - h).detach()", module=module, source=source)


def _trained(program: ExportedProgram, name: str | None) -> bool:
    tensor = program.state_dict.get(name or "")
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad


def _written(body: fx.GraphModule, operands: list[Any], learns: set[fx.Node]) -> Iterator[fx.Node]:
    """The operators of a region, and of regions in it, that write into memory of one of ``learns``."""
    holes = dict(zip([n for n in body.graph.nodes if n.op == "placeholder"], operands, strict=True))
    for node in body.graph.nodes:
        if node.target is SET_GRAD:
            inner = [_base(one) if isinstance(one, fx.Node) else one for one in node.args[2:]]
            yield from _written(getattr(body, str(node.args[1].target)), [holes.get(one, one) for one in inner], learns)
        elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            into = zip(node.target._schema.arguments, node.args, strict=False)
            bases = (_base(one) for spec, one in into if spec.is_write and isinstance(one, fx.Node))
            if any(holes.get(base) in learns and _is_float(base) for base in bases):
                yield node


def _is_float(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point()


def _base(node: fx.Node) -> fx.Node:
    """The tensor whose memory a view is of."""
    while (shown := _shown(node)) is not None:
        node = shown
    return node


def _shown(node: fx.Node) -> fx.Node | None:
    """The tensor that a view shows, or that an operator has written into."""
    target = node.target
    shows = isinstance(target, torch._ops.OpOverload) and (target.is_view or target._schema.is_mutable)
    return node.args[0] if shows and node.args and isinstance(node.args[0], fx.Node) else None


def _itself(node: fx.Node) -> fx.Node:
    """What a node of a region was given, if that is the very tensor that it returns: a conversion to its own dtype, a dropout
    in eval. The trace takes the result for that tensor from there on, so the program outside reads it as the region's, where it
    has its gradient all the same."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            break
        args, kwargs = map_aggregate((node.args, dict(node.kwargs)), _probe)  # type: ignore[misc]
        try:
            if node.target(*args, **kwargs) is not args[0]:
                break
        except (RuntimeError, NotImplementedError):
            break
        node = node.args[0]
    return node


def _probe(argument: Any) -> Any:
    """For a node a tensor like it, without contents; all devices are that of these; anything else as it is."""
    if isinstance(argument, torch.device):
        return torch.device("meta")
    if not isinstance(argument, fx.Node):
        return argument
    val = argument.meta.get("val")
    if not isinstance(val, torch.Tensor):
        return val
    return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")


def source_of(trace: str) -> str:
    """File and line of the model's code in a stack trace; of any code if none is the model's."""
    frames = _FRAME.findall(trace)
    mine = [frame for frame in frames if is_user_file(frame[0])]
    frames = mine or [frame for frame in frames if not frame[0].startswith("<")]
    return f"{frames[-1][0].rsplit('/', 1)[-1]}:{frames[-1][1]}" if frames else ""


_AGAIN = re.compile(r"@\d+$")
"""What torch.export puts behind the key of a module that is called again."""


def module_path(node: fx.Node) -> str:
    """Path of the innermost module in the original model; where a module is called again, its name ends in "@1", "@2"..."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    called = {prefix.count("."): again[0] for key, (prefix, _) in stack.items()
              if (again := _AGAIN.search(key)) and key[: again.start()].endswith(prefix.rpartition(".")[2])}
    if called:
        path = ".".join(part + called.get(at, "") for at, part in enumerate(path.split(".")))
    head, _, rest = path.partition(".")
    return rest if head.partition("@")[0] == WRAPPED else ""
