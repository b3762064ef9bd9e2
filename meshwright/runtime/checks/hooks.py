"""Hooks on the nodes that accumulate the gradients of parameters.

``p.expand_as(p).grad_fn.next_functions[0][0].register_hook(...)`` is how wrappers of models come to know of gradients. A
program writes gradients by itself, so such a hook would be called under some plans and not under others. Autograd makes the
node of a parameter when somebody asks, and again after the last who did has let go of it; here it is kept from the build on,
and so are the tables of its hooks, into which torch puts all that are registered on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.autograd.graph import get_gradient_edge

from meshwright.errors import RunError
from meshwright.runtime.state.names import NO_HOOK
from meshwright.runtime.state.optimizer import Nothing


@dataclass(frozen=True)
class Accumulator:
    """The node of a parameter, and the tables of its hooks."""

    fqn: str
    node: Any
    tables: tuple[Any, ...]


def accumulators(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Accumulator]:
    """Of those that take a gradient."""
    found = []
    for fqn, parameter in parameters:
        if parameter.requires_grad and not isinstance(parameter, Nothing):
            node = get_gradient_edge(parameter).node
            found.append(Accumulator(fqn, node, (_table(node.register_hook), _table(node.register_prehook))))
    return found


def _table(register: Any) -> Any:
    """The dict that this way to register a hook writes into."""
    handle = register(lambda *_: None)
    table = handle.hooks_dict_ref()
    handle.remove()
    return table


def check_accumulators(known: Sequence[Accumulator]) -> None:
    """Raise RunError if one of them has a hook."""
    for one in known:
        if any(one.tables):
            raise RunError(f"the node that accumulates the gradient of parameter {one.fqn!r} was given a hook: {NO_HOOK}")
