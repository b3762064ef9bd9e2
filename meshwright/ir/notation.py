'''The rule notation: one einsum-like line per operator.

    *b k, n k, n? -> *b n            linear: any leading dims; the third operand may be absent; k is summed
    ..., ...? -> ... ; +0 +1         multiplication: numpy broadcasting; a pending sum may pass through either operand
    ..., ... -> ... ; +0,1           addition: both operands pending sums together
    *b v! -> *b v                    softmax over the last dim: v stays whole
    *b . . -> *b . .                 pooling: two anonymous dims that are always whole
    *b -> ()                         sum of everything: the result is a scalar
    *b d:2 -> *b d                   d is cut in pieces of 2 elements, so that pairs stay together
    n c/groups *s! -> n c *s!        c is cut in as many pieces as the argument ``groups`` says, or in fewer, whole ones

Grammar (``parse_line`` reads it, ``str`` of a ``Line`` prints it):

    line    := terms "->" terms [";" group*]        group := "+" INT ("," INT)*
    terms   := [term ("," term)*]
    term    := ("()" | dim+) ["?"]                  "?": the operand may be absent
    dim     := ["*"] NAME ["!"] | NAME unit | "..." ["!"] | "."
    unit    := (":" | "/") (INT | NAME)             ":": elements of a piece, "/": number of pieces

A *factor* is an index letter: a NAME, one per dim that ``*NAME`` stands for (``b0 b1 ..``: the same number of dims wherever
it occurs), or one per broadcast dim of ``...`` (``dim0 dim1 ..``, aligned at the right, an operand's dims of size 1 free). A
factor of the operands that no result has is summed: the result is a pending sum over the axes that split it. ``!`` anywhere
keeps the factor whole. A *unit* is a piece of a dim that no split cuts: ``d:2`` says how long it is, ``c/groups`` how many
there are, by a number or by the name of a whole-number argument of the operator. Dims that share a factor are split at the
same units: ``b h:64 -> b h .`` makes heads of 64 elements a dim of their own. A group lists operand
positions (0 is the first) in which the operator is jointly linear; a group with an absent operand does not count.
'''

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import MeshwrightError

_TOKEN = re.compile(r"\s*(?:(->)|(\.\.\.)|(\(\))|(\d+(?!\w))|([A-Za-z_]\w*)|([*!?.,;+:/]))")
_RESERVED = re.compile(r"dim\d*")


class RuleError(MeshwrightError, ValueError):
    """A rule that cannot be read, or that does not fit its operator."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a term.

    ``kind``: "name", "star" (``*b``), "ellipsis" (``...``) or "dot" (anonymous, whole).
    ``unit``: what no split cuts: ":" or "/" and a number or the name of an argument, such as ":2" or "/groups".
    """

    kind: str
    name: str = ""
    whole: bool = False
    unit: str = ""

    @property
    def many(self) -> bool:
        """Whether it stands for any number of dims."""
        return self.kind in ("star", "ellipsis")

    def __str__(self) -> str:
        text = {"name": self.name, "star": f"*{self.name}", "ellipsis": "...", "dot": "."}[self.kind]
        return text + ("!" if self.whole else self.unit)


@dataclass(frozen=True, slots=True)
class Term:
    """One operand or result."""

    dims: tuple[Dim, ...]
    optional: bool = False

    def __str__(self) -> str:
        return (" ".join(map(str, self.dims)) or "()") + ("?" if self.optional else "")


@dataclass(frozen=True, slots=True)
class Line:
    """A rule as it is declared, before the shapes are known.

    >>> print(parse_line("*b k,n k , n?->*b n;+0"))
    *b k, n k, n? -> *b n ; +0
    """

    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    linear: tuple[frozenset[int], ...] = ()

    def __str__(self) -> str:
        left, right = ", ".join(map(str, self.operands)), ", ".join(map(str, self.results))
        groups = "".join(" +" + ",".join(map(str, sorted(group))) for group in self.linear)
        return f"{left} -> {right}".strip() + (f" ;{groups}" if groups else "")


def parse_line(text: str) -> Line:
    """Read a line; RuleError restates it with the position of what cannot be read."""
    return _Parser(text).line()


class _Parser:
    """Recursive descent over the tokens of one line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokens())
        self.at = 0

    def _tokens(self) -> Iterator[tuple[str, int]]:
        position = 0
        end = len(self.text.rstrip())
        while position < end:
            match = _TOKEN.match(self.text, position)
            if not match:
                position += len(self.text[position:]) - len(self.text[position:].lstrip())
                raise self._error(f"unexpected {self.text[position]!r}", position)
            start = next(match.start(i) for i in range(1, 7) if match.group(i) is not None)
            yield self.text[start : match.end()], start
            position = match.end()

    def _error(self, what: str, position: int | None = None) -> RuleError:
        if position is None:
            position = self.tokens[self.at][1] if self.at < len(self.tokens) else len(self.text)
        return RuleError(
            f"cannot read the rule at column {position + 1}: {what}\n  {self.text}\n  {' ' * position}^\n"
            'a rule is like "*b k, n k, n? -> *b n"'
        )

    @property
    def _next(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def _take(self, *wanted: str) -> bool:
        if self._next and self._next in wanted:
            self.at += 1
            return True
        return False

    def line(self) -> Line:
        operands = self._terms("->")
        if not self._take("->"):
            raise self._error("expected '->'")
        results = self._terms(";")
        groups = self._groups(len(operands)) if self._take(";") else ()
        if self._next:
            raise self._error(f"unexpected {self._next!r}")
        if not results:
            raise self._error("there is no result; a scalar is written ()")
        line = Line(operands, results, groups)
        self._check(line)
        return line

    def _terms(self, stop: str) -> tuple[Term, ...]:
        if self._next in ("", stop):
            return ()
        terms = [self._term()]
        while self._take(","):
            terms.append(self._term())
        return tuple(terms)

    def _term(self) -> Term:
        dims: list[Dim] = []
        if not self._take("()"):
            while self._next not in ("", ",", "->", ";", "?"):
                dims.append(self._dim())
            if not dims:
                raise self._error("a term has no dims; a scalar is written ()")
        if sum(dim.many for dim in dims) > 1:
            raise self._error("a term has two dims of unknown number")
        return Term(tuple(dims), self._take("?"))

    def _dim(self) -> Dim:
        if self._take("."):
            if self._next == "!":
                raise self._error("'.' is whole as it is")
            return Dim("dot")
        if self._take("..."):
            return Dim("ellipsis", whole=self._take("!"))
        kind = "star" if self._take("*") else "name"
        if not re.fullmatch(r"[A-Za-z_]\w*", self._next):
            raise self._error(f"expected a factor, '.' or '...', not {self._next!r}" if self._next else "expected a factor")
        name = self._next
        if kind == "star" and _RESERVED.fullmatch(name):
            raise self._error("the names dim, dim0, dim1, .. belong to '...'")
        self.at += 1
        if self._next in (":", "/"):
            return Dim(kind, name, unit=self._unit(kind))
        return Dim(kind, name, whole=self._take("!"))

    def _unit(self, kind: str) -> str:
        if kind == "star":
            raise self._error("a unit belongs to one dim")
        mark = self._next
        self.at += 1
        if not re.fullmatch(r"[1-9]\d*|[A-Za-z_]\w*", self._next):
            raise self._error("expected a number of 1 or more, or the name of an argument")
        unit = mark + self._next
        self.at += 1
        if self._next == "!":
            raise self._error("a whole dim has no unit")
        return unit

    def _groups(self, count: int) -> tuple[frozenset[int], ...]:
        groups = []
        while self._take("+"):
            group = [self._position(count)]
            while self._take(","):
                group.append(self._position(count))
            groups.append(frozenset(group))
        if not groups:
            raise self._error("expected a linear group such as '+0' or '+0,1'")
        return tuple(groups)

    def _position(self, count: int) -> int:
        if not self._next.isdigit() or int(self._next) >= count:
            raise self._error(f"expected the position of one of {count} operands")
        self.at += 1
        return int(self.tokens[self.at - 1][0])

    def _check(self, line: Line) -> None:
        kinds: dict[str, str] = {}
        every = (*line.operands, *line.results)
        for term in every:
            names = [dim.name for dim in term.dims if dim.name]
            for dim in term.dims:
                if dim.name and kinds.setdefault(dim.name, dim.kind) != dim.kind:
                    raise self._error(f"{dim.name!r} is both one dim and *{dim.name}", 0)
            for dim in term.dims:
                if dim.unit and any(dim.name == other.name and other.whole for t in every for other in t.dims):
                    raise self._error(f"{dim.name!r} is whole and has a unit", 0)
            if len(set(names)) != len(names):
                raise self._error(f"a factor is used twice in the term {term}", 0)
        if any(term.optional for term in line.results):
            raise self._error("a result cannot be absent", 0)
