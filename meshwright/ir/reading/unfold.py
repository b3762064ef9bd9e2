"""Plan files of version 2 as version 1 has them, every name written out; ``reading.plans`` then checks every field.

What a fold stands for is counted before it is written out: a small file that would become a huge one is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.errors import PlanError
from meshwright.ir.decisions import ONCE_AND_AGAIN
from meshwright.ir.pins import ROOT
from meshwright.ir.reading.fields import VERSION, Field, check_form
from meshwright.ir.writing.names import choice_of, kept_of, key_of
from meshwright.ir.writing.paths import unfold_paths

LARGEST_TEXT = 1 << 25
"""Characters that a file may stand for: ten times what Llama-3-405B does."""
LONGEST_NAME = 2000
FLAGS = ("trainable", "differentiable", "buffer", "persistent")


def unfolded(data: Any) -> dict[str, Any]:
    """The file as version 1. Raises PlanError with the path of the field that is wrong."""
    check_form(data)
    top = Field(data, "").record("meshwright fingerprint decisions predictions graph")
    made = top["fingerprint"].record("graph mesh versions", "decisions predictions")
    made["graph"].text()
    made["mesh"].text()
    for version in made["versions"].mapping().values():
        version.text()
    part = top["decisions"].record(
        "mesh cluster precision optimizer microbatches pipeline blocks operators values time prologue",
        f"registered devices {' '.join(ONCE_AND_AGAIN)}"
    )
    shown = top["predictions"].record("predicted certificate notes")
    graph = _graph(top["graph"])
    ops = {row[0]: at for at, row in enumerate(graph["ops"])}
    values = {row[0] for row in graph["values"]}
    chosen = _spread(part["operators"], ops)
    assignments = {name: _choice(field) for name, field in chosen.items()}
    sets = {kind: [name for item in part[kind].items() for name in _names(item, item.name(), len(ops))]
            for kind in ("prologue", *ONCE_AND_AGAIN) if kind in part}
    return {
        "meshwright": VERSION, **{name: part[name].value for name in ("mesh", "cluster", "precision", "optimizer")},
        "groups": _groups(part["blocks"], graph), "pipeline": _pipeline(part["pipeline"], ops),
        "schedule": {"microbatches": part["microbatches"].value, **sets,
                     "time": {name: field.value for name, field in _spread(part["time"], ops).items()}},
        "assignments": {name: one for name, one in assignments.items() if one},
        "copies": {name: field.value for name, field in _spread(part["values"], values).items()},
        **{name: part[name].value for name in ("registered", "devices") if name in part},
        **{name: field.value for name, field in shown.items()}, "graph": graph,
    }


# --- decisions -------------------------------------------------------------------------------------------------------------


def _names(field: Field, text: str, most: int) -> list[str]:
    """What a folded name stands for."""
    try:
        return unfold_paths(text, most)
    except ValueError as error:
        raise PlanError(f"the plan is damaged: {field.path}: {error}") from error


def _spread(field: Field, known: Mapping[str, int] | set[str]) -> dict[str, Field]:
    """{name: the text of the folded one}, every name one of those that are known, and each once."""
    found: dict[str, Field] = {}
    for text, one in field.mapping().items():
        one.text()
        for name in [text] if text in known else _names(field, text, len(known)):
            if name not in known or name in found:
                raise PlanError(f"the plan is damaged: {field.path}: {name!r} is " +
                                ("given twice" if name in found else "no operator or value of the graph"))
            found[name] = one
    order = {name: at for at, name in enumerate(known)} if isinstance(known, dict) else dict.fromkeys(found, 0)
    return dict(sorted(found.items(), key=lambda pair: order[pair[0]]))


def _choice(field: Field) -> dict[str, str]:
    try:
        return choice_of(field.text())
    except ValueError as error:
        raise field.wrong("a choice, as in 'dp=b0, tp=n'") from error


def _groups(field: Field, graph: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of every block, then of the root."""
    paths = [path for path, *_ in graph["blocks"]]
    count, ops = Counter(paths), {row[0] for row in graph["ops"]}
    names = [path if path and count[path] == 1 and path not in ops else graph["ops"][start][0]
             for path, _, start, _ in graph["blocks"]]
    kept = _spread(field, dict.fromkeys((*names, ROOT), 0))
    if len(kept) != len(set(names)) + 1:
        raise field.wrong(f"how each of {len(names)} blocks is kept, and what lies {ROOT}")
    found = []
    for path, name in zip((*paths, ""), (*names, ROOT), strict=True):
        text, _, stage = kept[name].text().partition(", stage ")
        try:
            one = kept_of(text)
        except ValueError as error:
            raise kept[name].wrong("how a block is kept, as in 'ZeRO 3, recompute none, gradients summed over dp'") from error
        if stage and not (stage.isascii() and stage.isdecimal() and len(stage) < 9):
            raise kept[name].wrong("the number of a stage at its end")
        found.append({"path": path, "zero": one.zero, "data_axes": list(one.data_axes), "shard_axes": list(one.shard_axes),
                      "recompute": one.recompute, "stage": int(stage or 0), "keep": one.keep})
    return found


def _pipeline(field: Field, ops: Mapping[str, int]) -> dict[str, Any] | None:
    if field.value is None:
        return None
    part = field.record("schedule stages stage_rank")
    starts = [ops[item.one_of(ops, "an operator of the graph")] for item in part["stages"].items()]
    return {"schedule": part["schedule"].value, "cuts": [*starts, len(ops)], "stage_rank": part["stage_rank"].value}


# --- the graph -------------------------------------------------------------------------------------------------------------


def _graph(field: Field) -> dict[str, Any]:
    part = field.record("inputs params operators output_tree loss mutations signature constants changes")
    room = _Room(field)
    values: list[Any] = []
    for item in part["inputs"].items():
        name, shape, dtype, differentiable = item.row(4)
        values.append([name.name(), shape.value, dtype.value, differentiable.value])
    params = []
    for row, _, path in room.rows(part["params"], 4, _param):
        fqns, shape, dtype, words = row
        flags = words.split(" ") if words else []
        if len(set(flags)) != len(flags) or not set(flags) <= set(FLAGS):
            raise PlanError(f"the plan is damaged: {path}[3]: expected words of {', '.join(FLAGS)}, found {words!r:.80}")
        held = {flag: flag in flags for flag in FLAGS}
        values.append([f"@{fqns[0]}", shape, dtype, held.pop("differentiable")])
        params.append({"value": f"@{fqns[0]}", "fqns": fqns, **held})
    ops: list[Any] = []
    blocks: list[Any] = []
    count: Counter[str] = Counter()
    for row, block, path in room.rows(part["operators"], 6, _operator):
        target, args, kwargs, results, module, source = row
        made = key_of(module, target, count)
        outputs = [f"{made}[{n}]" for n in range(len(results))] if len(results) > 1 else [made]
        for out, spec in zip(outputs, results, strict=False):
            if type(spec) is not list or len(spec) != 3:
                raise PlanError(f"the plan is damaged: {path}[3]: expected [shape, dtype, differentiable], found {spec!r:.80}")
            values.append([out, *spec])
        if block is not None and (not blocks or blocks[-1][0] is not block):
            blocks.append([block, len(ops), len(ops)])
        ops.append([made, target, args, kwargs, outputs, module, source])
        if block is not None:
            blocks[-1][2] = len(ops)
    return {
        "values": values, "inputs": [value[0] for value in values[: len(part["inputs"].items())]], "params": params, "ops": ops,
        "blocks": [[block.value["block"], block.value.get("kind"), start, stop] for block, start, stop in blocks],
        **{name: part[name].value for name in ("output_tree", "loss", "mutations", "signature", "constants", "changes")},
    }


class _Room:
    """Writes blocks out, as long as there is room."""

    def __init__(self, field: Field) -> None:
        self.field, self.left = field, LARGEST_TEXT

    def take(self, size: int) -> None:
        """Raise PlanError if it would be too much."""
        self.left -= size
        if self.left < 0:
            raise PlanError(f"the plan is damaged: {self.field.path}: its blocks stand for more than {LARGEST_TEXT} characters")

    def rows(self, field: Field, width: int, relative: Any) -> Iterator[tuple[list[Any], Field | None, str]]:
        """(row, the block it is in, its path) of all, in order."""
        blocks: list[tuple[list[list[Any]], int, int, int]] = []
        for entry in field.items():
            if type(entry.value) is list:
                yield relative([cell.value for cell in entry.row(width)], "", (), entry.path), None, entry.path
                continue
            like = type(entry.value) is dict and "like" in entry.value
            part = entry.record("block outside " + ("like" if like else "rows"), "kind")
            path, outside = part["block"].text(), [name.name() for name in part["outside"].items()]
            longest = max(map(len, (path, *outside)))
            if longest > LONGEST_NAME:
                raise part["block"].wrong(f"names of at most {LONGEST_NAME} letters")
            if like:
                body = blocks[part["like"].count(0, len(blocks) - 1)]
            else:
                found = [[cell.value for cell in row.row(width)] for row in part["rows"].items()]
                body = found, *_size(found), max((_ports(row) for row in found), default=0)
            blocks.append(body)
            rows, letters, cells, ports = body
            if ports > len(outside) or not rows:
                raise part["outside"].wrong(f"{ports} values, and a block that has rows")
            self.take(letters + cells * longest)
            for number, row in enumerate(rows):
                yield relative(row, path, outside, f"{entry.path}.rows[{number}]"), entry, f"{entry.path}.rows[{number}]"


def _size(tree: Any) -> tuple[int, int]:
    """(letters, texts and numbers) of a tree."""
    letters = cells = 0
    left = [tree]
    while left:
        item = left.pop()
        cells += 1
        if isinstance(item, dict):
            left += item.values()
            letters += sum(map(len, item))
        elif isinstance(item, list):
            left += item
        else:
            letters += len(item) if isinstance(item, str) else 8
    return letters, cells


def _ports(tree: Any) -> int:
    """One more than the largest k of "$k" among the uses of values."""
    most, left = 0, [tree]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            name = item.get("%")
            if item.keys() == {"%"} and type(name) is str and name[:1] == "$":
                number = name[1:]
                if not (number.isascii() and number.isdecimal() and len(number) < 9):
                    raise PlanError(f"the plan is damaged: a value is called {name!r:.80}; expected '$' and a number")
                most = max(most, int(number) + 1)
            elif item.keys() == {"map"}:
                left.append(item["map"])
    return most


def _text(value: Any, path: str) -> str:
    if type(value) is not str:
        raise PlanError(f"the plan is damaged: {path}: expected text, found {value!r:.80}")
    return value


def _param(row: list[Any], path: str, outside: Any, where: str) -> list[Any]:
    if type(row[0]) is not list or not row[0]:
        raise PlanError(f"the plan is damaged: {where}[0]: expected a list of names, found {row[0]!r:.80}")
    _text(row[3], f"{where}[3]")
    return [[_whole(_text(name, f"{where}[0]"), path) for name in row[0]], *row[1:]]


def _operator(row: list[Any], path: str, outside: Any, where: str) -> list[Any]:
    target, args, kwargs, results, module, source = row
    _text(target, f"{where}[0]")
    if type(results) is not list:
        raise PlanError(f"the plan is damaged: {where}[3]: expected a list of results, found {results!r:.80}")
    module = _whole(_text(module, f"{where}[4]"), path)
    if path or outside:
        args, kwargs = _uses(args, path, outside), _uses(kwargs, path, outside)
    return [target, args, kwargs, results, module, source]


def _whole(name: str, path: str) -> str:
    return f"{path}{name[1:]}" if path and name[:1] == "~" else name


def _uses(tree: Any, path: str, outside: Any) -> Any:
    """Arguments of a block's operator with the names of values written out."""
    if isinstance(tree, list):
        return [_uses(item, path, outside) for item in tree]
    if not isinstance(tree, dict):
        return tree
    name = tree.get("%")
    if tree.keys() == {"%"} and type(name) is str:
        if name[:1] == "$":
            return {"%": outside[int(name[1:])]}
        return {"%": f"@{_whole(name[1:], path)}" if name[:1] == "@" else _whole(name, path)}
    if tree.keys() == {"map"} and type(tree["map"]) is list:
        return {"map": [[pair[0], _uses(pair[1], path, outside)] if type(pair) is list and len(pair) == 2 else pair
                        for pair in tree["map"]]}
    return tree
