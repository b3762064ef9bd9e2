"""The book of rules: which operator has which rule, and the rule of one call.

A *declaration* is a line of the notation or a function of the ``Call``, with an optional localizer that rewrites the call for
one rank. ``RuleBook.rule_for`` instantiates it on an operator's shapes; instances are cached by target, shapes and
literals, so repeated layers cost one look-up. Users add theirs with ``register_rule``; the registered rules live in the
current context (``contextvars``), the built-in ones in the tables of this folder.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch

from meshwright.compiler.rules.call import Call, RuleFunction, bind
from meshwright.ir.draws import Seeded, draws
from meshwright.ir.graph import Graph, Op, Ref
from meshwright.ir.notation import Line, parse_line
from meshwright.ir.rule import Localize, OpRule, RuleError

TABLES = (
    "pointwise", "matmul", "views", "joining", "normalization", "attention", "indexing", "reductions", "loss", "convolution",
    "factories", "random", "recurrent", "custom.splits",
)
"""Modules of this folder, each with a table ``RULES`` of target -> declaration."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """A line or a function, and a localizer for the calls that need one."""

    rule: Line | RuleFunction
    localize: Localize | None = None

    def instance(self, call: Call) -> OpRule:
        """The rule of one call."""
        if isinstance(self.rule, Line):
            return call.line(self.rule, localize=self.localize)
        rule = self.rule(call)
        if not isinstance(rule, OpRule):
            raise RuleError(f"the rule function of {call.target} returned {rule!r}, not an OpRule")
        if self.localize is None or rule.localize is not None:
            return rule
        return replace(rule, localize=self.localize)


def declare(rule: str | RuleFunction, localize: Localize | None = None) -> Declaration:
    """A declaration from a line's text or from a function."""
    return Declaration(parse_line(rule) if isinstance(rule, str) else rule, localize)


@dataclass(frozen=True)
class RuleBook:
    """Declarations by target.

    >>> book = RuleBook({"aten.relu.default": declare("... -> ...")})
    >>> book.known("aten.relu.default"), book.known("aten.mystery.default")
    (True, False)
    """

    declarations: Mapping[str, Declaration]
    _instances: dict[Any, OpRule] = field(default_factory=dict, compare=False, repr=False)

    def known(self, target: str) -> bool:
        """Whether the book has a rule for an operator such as "aten.linear.default"."""
        return target in self.declarations

    def adding(self, target: str, declaration: Declaration) -> RuleBook:
        """The book with one more rule, which replaces an older one of the same operator."""
        return RuleBook(MappingProxyType({**self.declarations, target: declaration}))

    def rule_for(self, op: Op, graph: Graph) -> OpRule:
        """The rule of one operator of a graph; an unknown operator is whole on every rank (``known=False``). One that draws
        random numbers draws them from the run's seed (``meshwright.ir.draws``).

        Raises RuleError, naming the operator, when its rule does not fit its shapes.
        """
        key = (op.target, _key(op.args, graph), _key(op.kwargs, graph), tuple(_type(name, graph) for name in op.outputs))
        found = self._instances.get(key)
        if found is None:
            declaration = self.declarations.get(op.target)
            try:
                call = bind(op, graph)
                found = call.whole(known=False) if declaration is None else declaration.instance(call)
            except RuleError as error:
                raise RuleError(f"{error}\n  operator: {op}") from error
            if draws(op) and not isinstance(found.localize, Seeded):
                found = replace(found, localize=Seeded(found.localize))
            self._instances[key] = found
        return found


def _type(name: str, graph: Graph) -> Any:
    value = graph.values[name]
    return value.shape, value.dtype


def _key(argument: Any, graph: Graph) -> Any:
    """A hashable stand-in for an argument: tensors by shape and dtype, numbers with their type (1, 1.0 and True differ)."""
    if isinstance(argument, Ref):
        return _type(argument.name, graph)
    if isinstance(argument, tuple | list):
        return tuple(_key(item, graph) for item in argument)
    if isinstance(argument, Mapping):
        return tuple((name, _key(item, graph)) for name, item in argument.items())
    return type(argument), argument


@functools.lru_cache(maxsize=1)
def builtin_rules() -> RuleBook:
    """The rules that come with meshwright."""
    declarations: dict[str, Declaration] = {}
    for name in TABLES:
        table: Mapping[str, Declaration] = importlib.import_module(f"meshwright.compiler.rules.{name}").RULES
        if repeated := declarations.keys() & table.keys():
            raise RuleError(f"two rules for {', '.join(sorted(repeated))}, the second in rules/{name}.py")
        declarations.update(table)
    return RuleBook(MappingProxyType(declarations))


_registered: ContextVar[RuleBook | None] = ContextVar("meshwright_rules", default=None)


def default_rules() -> RuleBook:
    """The built-in rules and those registered in this context."""
    return _registered.get() or builtin_rules()


def register_rule(target: str | Any, rule: str | RuleFunction, *, localize: Localize | None = None) -> None:
    """Give an operator a sharding rule, in the current context (threads started later begin without it).

    ``target``: "mylib.scale.default", an ``OpOverload``, or what ``torch.library.custom_op`` returned. ``rule``: a line of
    the notation, or a function ``(call: Call) -> OpRule``. ``localize``: ``(op, local) -> (target, args, kwargs)``, where
    the call has literals that depend on the shapes. Raises RuleError for a line that cannot be read.

    >>> register_rule("mylib.scale.default", "*b k, k! -> *b k")
    >>> default_rules().known("mylib.scale.default")
    True
    """
    name = _target_name(target)
    _registered.set(default_rules().adding(name, declare(rule, localize)))


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    overload = getattr(target, "_opoverload", None)
    if overload is not None:
        return str(overload)
    if isinstance(target, str) and target.count(".") in (1, 2):
        return target if target.count(".") == 2 else f"{target}.default"
    raise RuleError(f'register_rule takes "namespace.name.overload" or an operator of torch.ops, not {target!r}')
