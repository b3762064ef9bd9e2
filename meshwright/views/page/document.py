"""The HTML file: data and libraries in one, nothing loaded from anywhere.

The content security policy allows the scripts and the style of the file by their hashes and nothing else: no network, no
frames, no inline handlers, no ``eval``. Data stand in JSON elements, in which "<" is written as its escape, so that no name of
a model can end the element; the page's script puts them in as text. The same plan gives the same file, byte for byte.

Libraries (``assets/LICENSES.txt``): cytoscape.js 3.34 draws, cytoscape-dagre 4.0 with dagre lays out.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

SCRIPTS = ("cytoscape.min.js", "cytoscape-dagre.min.js", "page.js")
OF_CYTOSCAPE = "__________cytoscape_stylesheet"
"""The id of a style element that cytoscape adds if it is not there; a policy by hashes has no room for it."""

_BODY = """\
<header><h1 id="title"></h1><div class="chips" id="chips"></div></header>
<div class="bar">
<div class="search"><input type="search" id="search" placeholder="Search operators, modules, weights" aria-label="Search">
<ul id="found" hidden></ul></div>
<div class="switch" id="switch" role="group" aria-label="Which plan" hidden></div>
<button id="all" type="button">Start view</button><button id="fit" type="button">Fit</button>
<button id="out" type="button" aria-label="Zoom out">−</button><button id="in" type="button" aria-label="Zoom in">+</button>
</div>
<main>
<section class="card" id="graph-card" aria-label="Graph"><div id="graph"></div><div id="legend"></div></section>
<aside class="card" id="panel" aria-live="polite"></aside>
</main>
<div class="sections">
<section class="card wide" id="clock" hidden></section>
<section class="card" id="time"></section>
<section class="card" id="memory"></section>
<section class="card wide" id="search-card"></section>
</div>
<noscript>This page draws the plan with the script that is in it; please allow scripts.</noscript>
"""


def document(plans: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """The file that shows ``plans`` (``data.page_data``), the second to compare the first with."""
    scripts = [_asset(name) for name in SCRIPTS]
    style, empty = _asset("page.css"), ".__________cytoscape_container { position: relative; }"
    policy = "; ".join([
        "default-src 'none'", f"script-src {' '.join(map(_hash, scripts))}", f"style-src {_hash(style)} {_hash(empty)}",
        "img-src data:", "base-uri 'none'", "form-action 'none'",
    ])
    blocks = [_json("plan-names", list(names)), *(_json(f"plan-{number}", plan) for number, plan in enumerate(plans))]
    title = html.escape(str(plans[0]["title"]))
    return "\n".join([
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', f"<title>{title}</title>",
        f"<style>{style}</style>", f'<style id="{OF_CYTOSCAPE}">{empty}</style>', "</head><body>", _BODY + "\n".join(blocks),
        *(f"<script>{script}</script>" for script in scripts), "</body></html>", "",
    ])


def _asset(name: str) -> str:
    text = files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
    text = re.sub(r"\n//# sourceMappingURL=\S*\s*$", "\n", text)  # a map that is not shipped
    if "</script" in text or "</style" in text:
        raise ValueError(f"{name} cannot stand in a page: it closes its own element")
    return text


def _hash(text: str) -> str:
    """The source expression of a policy that allows this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(name: str, data: Any) -> str:
    """An element of data, which no policy needs to allow, as nothing in it runs."""
    text = json.dumps(_finite(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _finite(data: Any) -> Any:
    """The data with what JSON has no number for (infinite, missing) as null; keys as text."""
    if isinstance(data, float):
        return data if data - data == 0.0 else None
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return data
