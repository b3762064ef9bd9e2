"""Lines of a printed plan as pins: what a person reads in a table, pasted back.

    plan  dp=2 x tp=4 on h100:1x8, 8 devices                     the mesh, or only dp=2 x tp=4
    model.layers.0..31 (32 equal blocks)                         the title of a table: what the rows under it are of
      mlp.up_proj   weight f32[14336@tp, 4096]   f32[8@dp, ...   a row: its weights; without a title of any such module
      mlp.up_proj   ./out.weight f32[4096, 14336@tp]             named from the title ("../": the module around it)
      mlp.up_proj   /embed.weight f32[32000, 4096]               named from the model
      model.layers.0..31   3   dp   dp   none                    a row of the last table: how blocks keep their parameters
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.ir.writing.names import ROOT, Kept, kept_text
from meshwright.ir.writing.paths import unfold_paths

_MESH = re.compile(r"(?:plan\s+)?(\w+\*?=\d+(?: x \w+\*?=\d+)*)(?: on .*)?")
_TITLE = re.compile(r"(.+) \((?:\d+ equal blocks|outside the blocks)\)|(outside the blocks)|((?![a-z]+\d*\[)\S+)")
_WEIGHT = r"(\S+) (\w+\[[^\]]*\])"
_ROW = re.compile(rf"(?:(\S+)\s+)?{_WEIGHT}(?:\s{{2,}}.*)?")
_KEPT = re.compile(r"(outside the blocks|\S+(?:, \S+)*)\s{2,}([0-3])\s{2,}(-|\w+(?:, \w+)*)\s{2,}(-|\w+(?:, \w+)*)\s{2,}"
                   r"(none|selective|full)\b.*")


def pins_of_lines(text: str) -> dict[str, Any]:
    """The pins that some lines of a printed plan are, as a dict. Raises ValueError for a line that is none.

    >>> pins_of_lines("mlp.up_proj   weight f32[64@tp, 32]   f32[8@dp, 16, 64@tp]")
    {'tensors': {'*mlp.up_proj.weight': 'f32[64@tp, 32]'}}
    >>> pins_of_lines("dp=2 x cp*=4")
    {'axes': {'dp': 2, 'cp*': 4}}
    """
    found: dict[str, Any] = {}
    title: str | None = None
    module = ""
    started = ""
    for line in (line.strip() for line in text.splitlines()):
        if line.endswith(",") and not _ROW.fullmatch(line):  # a title of many paths goes on in the next line
            started += f"{line} "
            continue
        line, started = started + line, ""
        if not line or set(line) <= set("─-━ ") or line.startswith(("module ", "block ")):
            continue
        if mesh := _MESH.fullmatch(line):
            found["axes"] = {axis: int(size) for axis, size in (part.split("=") for part in mesh[1].split(" x "))}
        elif kept := _KEPT.fullmatch(line):
            data, shard = (() if word == "-" else tuple(word.split(", ")) for word in kept.group(3, 4))
            name = ROOT if kept[1] == "outside the blocks" else kept[1]
            found.setdefault("blocks", {})[name] = kept_text(Kept(int(kept[2]), data, shard, kept[5]))
        elif row := _ROW.fullmatch(line):
            module = row[1] or module
            found.setdefault("tensors", {}).update(dict.fromkeys(_patterns(title, module, row[2], line), row[3]))
        elif name := _TITLE.fullmatch(line):
            title, module = name[1] or name[3] or "", ""
        else:
            raise ValueError(f"{line!r} is no line of a plan's tables that can be pinned: a weight's row, how blocks keep "
                             "their parameters, or the plan's mesh; meshwright.explain prints the pin of an operator")
    if started or not found:
        raise ValueError(f"{(started or text)!r:.80} has no line that pins anything")
    return found


def _patterns(title: str | None, module: str, weight: str, line: str) -> list[str]:
    """Names of the parameter in a row."""
    if weight.startswith("/"):
        return [weight[1:]]
    if weight.startswith("."):
        mark, _, inner = weight.rpartition("/")
        up = mark.count("..")
    else:
        inner, up = weight if module == "." else f"{module}.{weight}", 0
    if title is None:
        if up or (module in ("", ".") and inner == weight):
            raise ValueError(f"{line!r} does not say of which module it is; paste the title of its table as well")
        return [f"*{inner}"]
    paths = [_named_from(path).split(".") for path in unfold_paths(title)]
    around = [".".join(path[: len(path) - up]) for path in paths]
    return [f"{path}.{inner}" if path else inner for path in around]


def _named_from(path: str) -> str:
    """The module that rows under a title are named from: of a block that an operator begins (``module:operator``) the model, or
    one inside whose rows stand for themselves."""
    _, operator, rest = path.partition(":")
    return rest.partition(".")[2] if operator else path
