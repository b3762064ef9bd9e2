"""Which rules ``register_rule`` declared in this context, in words: a plan means what it says only where the same ones are.

A plan carries the words of those that its graph needs (``Decisions.registered``). They end in a digest of the rule itself, so
that a function of the same name that says something else is told apart. Reading a plan compares them with what is declared
here; nothing of the plan's words is executed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from meshwright.errors import PlanError
from meshwright.ir.declared.experts import Experts
from meshwright.ir.gradients.custom import CustomFunction
from meshwright.ir.graph import LITERALS, Graph, Ref

_registered: ContextVar[Mapping[str, str]] = ContextVar("meshwright_registered", default=MappingProxyType({}))


def remember(target: str, words: str) -> None:
    """Note that an operator was declared by the user, in the current context."""
    _registered.set(MappingProxyType({**_registered.get(), target: words}))


def registered_of(graph: Graph) -> dict[str, str]:
    """{operator of the graph, or of a graph inside it, that was registered in this context: its rule in words}, by name."""
    found = _registered.get()
    return {target: found[target] for target in sorted(_targets(graph)) if target in found}


def check_registered(needed: Mapping[str, str], graph: Graph) -> None:
    """Raise PlanError, naming it, for a rule that a plan of this graph needs and that is missing here or is another one."""
    here = registered_of(graph)
    for target in sorted(needed.keys() | here.keys()):
        if needed.get(target) != here.get(target):
            raise PlanError(
                "the plan was made with "
                + (f"the registered rule {needed[target]!r}" if target in needed else "no registered rule")
                + f" for {target}, here " + (f"it is {here[target]!r}" if target in here else "nobody registered one")
                + "; call meshwright.register_rule as in the run that made the plan, or plan again"
            )


def _targets(graph: Graph) -> Collection[str]:
    """The operators of a graph and of the graphs inside it."""
    found = {op.target for op in graph.ops}
    for op in graph.ops:
        for inner in _inside((op.args, op.kwargs)):
            found |= set(_targets(inner))
    return found | set(_targets(graph.changes)) if graph.changes else found


def _inside(tree: Any) -> Iterator[Graph]:
    if type(tree) in LITERALS or type(tree) is Ref:
        return
    if isinstance(tree, CustomFunction):
        yield from (tree.forward, tree.backward)
    elif isinstance(tree, Experts):
        yield tree.graph
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from _inside(item)


def named(function: Any) -> str:
    """The name of a function, for words."""
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', type(function).__name__)}"


def content(function: Any) -> str:
    """What a function says: equal for functions of equal source that close over equal numbers and texts."""
    if isinstance(function, functools.partial):
        return f"{content(function.func)}({function.args!r}, {function.keywords!r})"
    code = getattr(function, "__code__", None)
    if code is None:
        return named(function)
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        text = ""
    with contextlib.suppress(SyntaxError):  # a lambda within a call may be no statement: its text as it stands
        text = ast.dump(ast.parse(text))  # comments and the width of lines say nothing
    closed = [cell.cell_contents for cell in function.__closure__ or ()]
    plain = [value for value in closed if isinstance(value, int | float | str | tuple)]
    return repr([named(function), text or code.co_code.hex(), plain])


def digest_of(*parts: str) -> str:
    """A short digest of texts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
