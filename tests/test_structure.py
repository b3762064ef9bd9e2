"""The way imports point, and other promises about the code that only the code as a whole can break.

    doors (planner api cli views published, the package itself)
      -> compiler -> cost -> ir        passes -> ir        runtime -> ir

Imports inside functions count like the others, towards the direction and towards circles.
"""

from __future__ import annotations

import ast
import glob
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType

import networkx as nx
import pytest

import meshwright

ROOT = Path(meshwright.__file__).parent
FOLDERS = ("ir", "compiler", "cost", "passes", "runtime", "views", "published")
FILES_IN_A_FOLDER = 15
ALLOWED: Mapping[str, frozenset[str]] = {
    "ir": frozenset({"ir"}),
    "cost": frozenset({"cost", "ir"}),
    "compiler": frozenset({"compiler", "cost", "ir"}),
    "passes": frozenset({"passes", "ir"}),
    "runtime": frozenset({"runtime", "ir"}),
    "views": frozenset({"views", "doors", "compiler", "cost", "passes", "ir"}),
    "published": frozenset({"published", "doors", "compiler", "cost", "ir"}),
    "doors": frozenset({"doors", "views", "published", "compiler", "cost", "passes", "runtime", "ir"}),
}
THIRD_PARTY: Mapping[str, frozenset[str]] = {
    "ir": frozenset({"torch", "numpy"}),
    "runtime": frozenset({"torch", "numpy", "safetensors"}),
    "cost": frozenset({"torch", "numpy", "networkx", "sympy"}),
}
PRIVATE: Mapping[str, str] = {
    "compiler/capture/capture.py": "FakeTensorMode: export under shapes without data",
    "compiler/capture/functions.py": "_SingleLevelFunction.apply, where every custom Function passes; modes, fakes",
    "compiler/capture/exported/composites.py": "OpOverload: which nodes of a traced operator are operators",
    "compiler/capture/exported/importer.py": "FakeTensor and OpOverload: reading an exported graph's nodes",
    "compiler/capture/exported/regions.py": "OpOverload: which operators return or write what they are given, or a view",
    "compiler/capture/exported/writes.py": "OpOverload, and whether an operator is made of others: what shares memory",
    "compiler/capture/sharing.py": "pytree: tensors in lists and dicts of a module",
    "compiler/capture/shadow.py": "FakeTensorMode: a shadow with fake parameters; _detect_is_causal_mask of nn.Transformer",
    "compiler/capture/watch.py": "FakeTensor; what functorch wraps: tensors that are not the model's",
    "compiler/rules/book.py": "OpOverload: an operator object given to register_rule",
    "ir/operators.py": "OpOverload: what the name of an operator must stand for",
    "runtime/checks/ports.py": "FakeTensor: an input that can be cut like a plain one, as the benchmark of memory gives",
    "runtime/collectives.py": "the operator namespace _c10d_functional",
    "runtime/checks/edits.py": "pytree, to see operands in lists",
    "runtime/draws.py": "pytree, to see operands in lists",
    "runtime/checks/elsewhere.py": "_C.DisableTorchFunctionSubclass: shape and dtype of what is on other ranks",
    "runtime/checks/gradients.py": "_will_engine_execute_node: whether a parameter's gradient is returned, not accumulated; "
                                   "_current_graph_task_id, _top_saved_tensors_default_hooks: whether a call is checkpointed; "
                                   "_functorch: whether it is transformed by torch.func",
    "runtime/checks/outputs.py": "pytree, to see operands in lists; _local_scalar_dense: a number taken out of a tensor",
    "runtime/state/norms.py": "_foreach_mul_: clipping, as torch.nn.utils does it",
    "runtime/state/reading.py": "_dispatch_get_all_op_names: operators of which torch before 2.13 asks no class",
    "runtime/verdict.py": "_world, _get_default_store: the groups and the store of a process whose step failed",
    "runtime/whole.py": "pytree, to see operands in lists; the lists of types that optimizers' fast variants take",
    "runtime/pipeline/ordered.py": "_PipelineScheduleRuntime, which runs any table; _Action, in which it takes one",
    "runtime/step.py": "_foreach_mul_: scaling released gradients",
}
"""Files that may name private parts of torch, with the reason."""


@dataclass(frozen=True)
class Import:
    """``source`` names ``target`` in an import statement, wherever it stands."""

    source: str
    target: str


def modules() -> dict[str, Path]:
    """{dotted name: file} of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("meshwright", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES: Mapping[str, Path] = modules()


@cache
def trees() -> Mapping[str, ast.Module]:
    """{module: its syntax}; seconds, so not when the tests are collected."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def names_of(node: ast.AST) -> list[str]:
    """Dotted names that an import statement brings in (what is imported from a package may be a module or a name)."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        found = [f"{node.module}.{alias.name}" for alias in node.names]
        return [name if name in MODULES or not name.startswith("meshwright") else node.module for name in found]
    return []


def imports(name: str) -> Iterator[Import]:
    """All imports of a module."""

    for node in ast.walk(trees()[name]):
        for target in names_of(node):
            yield Import(name, target)


def all_imports() -> list[Import]:
    """Of the whole package."""
    return [found for name in MODULES for found in imports(name)]


def room(name: str) -> str:
    """Where a module of the package belongs."""
    parts = name.split(".")
    if len(parts) > 1 and parts[1] in FOLDERS:
        return parts[1]
    return "ir" if name == "meshwright.errors" else "doors"  # errors stand at the root for their public name


def test_imports_point_one_way() -> None:
    wrong = [
        f"{found.source} ({room(found.source)}) imports {found.target} ({room(found.target)})"
        for found in all_imports()
        if found.target.startswith("meshwright") and room(found.target) not in ALLOWED[room(found.source)]
    ]
    assert not wrong


def test_rooms_stay_light() -> None:
    wrong = []
    for found in all_imports():
        top, here = found.target.split(".")[0], room(found.source)
        if here in THIRD_PARTY and top not in {*sys.stdlib_module_names, "meshwright", *THIRD_PARTY[here]}:
            wrong.append(f"{found.source} ({here}) imports {found.target}")
    assert not wrong


def test_planning_imports_no_distributed_runtime() -> None:
    wrong = [
        f"{found.source} imports {found.target}" for found in all_imports()
        if room(found.source) in ("compiler", "cost", "passes") and found.target.startswith(("torch.distributed", "torch.cuda"))
    ]
    assert not wrong


def test_no_circles() -> None:
    graph = nx.DiGraph()
    for found in all_imports():
        # a package's own name stands for its __init__, which every module below it runs anyway
        if found.target in MODULES and not found.source.startswith(f"{found.target}."):
            graph.add_edge(found.source, found.target)
    assert graph.number_of_edges() > 100
    circles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    assert not circles


def test_folders_stay_small() -> None:
    count = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert not {str(folder.relative_to(ROOT)): files for folder, files in count.items() if files > FILES_IN_A_FOLDER}


def test_no_module_level_mutable_state() -> None:
    mutable = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
    read_only = ("Mapping", "Sequence", "Final", "frozenset", "tuple", "AbstractSet")
    wrong = []
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, mutable):
                wrong += [f"{name}: {ast.unparse(t)} is mutable; annotate it Mapping or Sequence, or use a tuple"
                          for t in node.targets if ast.unparse(t) != "__all__"]
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, mutable):
                typed = ast.unparse(node.annotation).startswith(read_only)
                wrong += [] if typed else [f"{name}: {ast.unparse(node.target)} is mutable"]
        wrong += [f"{name}: {ast.unparse(node)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not wrong


def private_names(tree: ast.Module) -> set[str]:
    """Private names of torch that a module spells out."""
    found = {target for node in ast.walk(tree) for target in names_of(node) if target.startswith("torch")}
    found |= {text for node in ast.walk(tree) if isinstance(node, ast.Attribute)
              and (text := ast.unparse(node)).startswith("torch.")}
    return {text for text in found if any(part.startswith("_") and not part.startswith("__") for part in text.split("."))}


def test_private_torch_is_confined() -> None:
    using = {MODULES[name].relative_to(ROOT).as_posix() for name, tree in trees().items() if private_names(tree)}
    assert using == set(PRIVATE), "list the file with its reason, or strike it off"


def test_files_and_functions_stay_readable() -> None:
    wrong = []
    for name, tree in trees().items():
        lines = MODULES[name].read_text(encoding="utf-8").count("\n")
        wrong += [f"{name} has {lines} lines"] if lines > 600 else []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                wrong += [f"{name}.{node.name} has {length} lines"] if length > 75 else []
    assert not wrong


def test_a_class_name_is_one_class() -> None:
    """Two classes of one name would be two things under one word."""
    names = Counter(
        node.name for tree in trees().values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1 and not name.startswith("_")]


def test_modules_and_public_names_are_documented() -> None:
    wrong = []
    for name, tree in trees().items():
        wrong += [] if ast.get_docstring(tree) or not tree.body else [name]
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                wrong.append(f"{name}.{node.name}")
    assert not wrong


def test_public_names_resolve() -> None:
    for name in meshwright.__all__:
        assert getattr(meshwright, name) is not None
    import_module("meshwright.ir.plan")  # the module of the same name must not shadow the function
    assert isinstance(meshwright.plan, FunctionType)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        meshwright.nothing_like_it  # noqa: B018 - the access is the test


def test_what_is_no_code_is_in_the_wheel() -> None:
    """Tables, the page's scripts and the schema are named in the package data, or an installed package lacks them."""
    setup = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["meshwright"]
    packed = {name for pattern in patterns for name in glob.glob(pattern, root_dir=ROOT, recursive=True)}
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    there = {str(path) for path in files if "__pycache__" not in path.parts}
    assert not {name for name in there - packed if not name.endswith((".py", ".pyc"))}
    assert "ir/reading/plan.schema.json" in packed


def test_every_dependency_is_imported() -> None:
    """What the package declares it needs, it uses."""
    declared = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in declared}  # type: ignore[index]
    assert names - {found.target.split(".")[0] for found in all_imports()} == set()
