"""Lines of a printed plan as pins: what a person reads in a table, pasted back.

    plan  dp=2 x tp=4 on h100:1x8, 8 devices                     the mesh, or only dp=2 x tp=4
    model.layers.0..31 (32 equal blocks)                         the title of a table: what the rows under it are of
      mlp.up_proj   weight f32[14336@tp, 4096]   f32[8@dp, ...   a row: its weights; without a title of any such module
      model.layers.0..31   3   dp   dp   none                    a row of the last table: how blocks keep their parameters
"""

from __future__ import annotations

import re
from typing import Any

from meshwright.ir.writing.names import ROOT, Kept, kept_text
from meshwright.ir.writing.paths import unfold_paths

_MESH = re.compile(r"(?:plan\s+)?(\w+\*?=\d+(?: x \w+\*?=\d+)*)(?: on .*)?")
_TITLE = re.compile(r"(\S+) \(\d+ equal blocks\)|(outside the blocks)|([\w.]+)")
_WEIGHT = r"(\w+) ((?:\w+)\[[^\]]*\])"
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
    for line in (line.strip() for line in text.splitlines()):
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
    if not found:
        raise ValueError(f"{text!r:.80} has no line that pins anything")
    return found


def _patterns(title: str | None, module: str, weight: str, line: str) -> list[str]:
    """Names of the parameter in a row."""
    inner = "" if module == "." else f"{module}."
    if title is None and module in ("", "."):
        raise ValueError(f"{line!r} does not say of which module it is; paste the title of its table as well")
    if title is None:
        return [f"*{inner}{weight}"]
    return [f"{path}.{inner}{weight}" if path else f"{inner}{weight}" for path in unfold_paths(title)]
