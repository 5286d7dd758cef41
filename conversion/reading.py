"""Which keys of a config.json transformers' code reads, found in that code.

A key that no line reads cannot change what a model computes, whoever wrote it there. The search errs towards reading:
in a family's own files every name that could be a key counts, in the files that all families share, every attribute of
something called `self` or `…config` and every name that is looked up by `getattr` and the like.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import transformers

HOME = Path(transformers.__file__).parent
LOOKUPS = {"getattr", "hasattr", "get", "pop", "setdefault"}
# What every config, and every model, is made of.
FOUNDATIONS = ("configuration_utils.py", "modeling_utils.py", "modeling_rope_utils.py", "generation/utils.py")


def keys_read(config: type, models: Iterable[str]) -> frozenset[str] | None:
    """The names that transformers' code for a config class may read; None where the class is not one of its own.

    Args:
        models: names of the classes of models, in transformers, that are built from it.
    """
    if not config.__module__.startswith("transformers.models."):
        return None
    classes = (config, *(getattr(transformers, name) for name in models))
    return frozenset().union(*(read_beside(kind.__module__) for kind in classes))


@cache
def read_beside(module: str) -> frozenset[str]:
    """The names that may be read by the files of one of transformers' models."""
    folder = HOME.joinpath(*module.split(".")[1:-1])
    own = {path for kind in ("configuration", "modeling") for path in folder.glob(f"{kind}_*.py")}
    shared = {HOME / name for name in FOUNDATIONS}
    for path in own:
        shared.update(imported(path))
    found = {name for path in own for name in every_name(path)}
    return frozenset(found.union(*(looked_up(path) for path in shared - own)))


def imported(path: Path) -> Iterator[Path]:
    """transformers' own files from which one of them imports by name."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            home = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            options = [home, *(home / alias.name for alias in node.names)]
            yield from (file for option in options if (file := option.with_suffix(".py")).is_file())


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def every_name(path: Path) -> frozenset[str]:
    """Attributes that are read, and strings."""
    nodes = list(ast.walk(parsed(path)))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(read | {text for text in strings if text.isidentifier()})


@cache
def looked_up(path: Path) -> frozenset[str]:
    """Attributes of `self` and of configs that are read, and strings that are looked up."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and is_config(last_name(node.value)):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and last_name(node.func) in LOOKUPS:
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return frozenset(found)


def is_config(name: str) -> bool:
    return name == "self" or name.endswith("config")


def last_name(node: ast.expr) -> str:
    """`b` of `b` and of `a.b`; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
