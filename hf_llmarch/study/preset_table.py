"""The rows of `presets.toml`: what is known of each model of the line, read without any library."""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("presets.toml")


@cache
def table() -> dict[str, dict[str, Any]]:
    """The rows of `presets.toml`, each complete: what it leaves to another one is filled in."""
    rows = tomllib.loads(TABLE.read_text("utf-8"))
    return {name: filled(name, rows) for name in rows}


def filled(name: str, rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row with what the one it is like says of the architecture; the source and the numbers are its own."""
    row = dict(rows[name])
    base = filled(row.pop("like"), rows) if "like" in row else {"note": None, "family": None, "config": {}}
    config = merged(base["config"], row.get("config", {}) | dict.fromkeys(row.pop("null", ())))
    shared = {"note": base["note"], "family": base["family"]}
    return {**shared, "published": {}, **row, "config": config}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes`, in nested dicts too."""
    nested = {
        k: merged(base[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return {**base, **changes, **nested}


def names() -> list[str]:
    """The presets there are, in the order of the line."""
    return list(table())


def row(name: str) -> dict[str, Any]:
    """The preset's row: source, numbers of ours and published ones, note, family and config.

    Raises:
        ValueError: for a name that is not there, with the closest that are.
    """
    if name not in table():
        close = difflib.get_close_matches(name, table(), n=3)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else " `hf-llmarch presets` lists them."
        raise ValueError(f"No preset {name!r}.{hint}")
    return table()[name]
