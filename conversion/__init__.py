"""Public checkpoints into `LlmArchForCausalLM` and back out, byte for byte. Nothing is imported before it is asked for."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convert import convert, export, load
    from .families import families
    from .rules import export_plan, plan
    from .verify import verify

_HOME = {
    "convert": "convert",
    "export": "convert",
    "export_plan": "rules",
    "families": "families",
    "load": "convert",
    "plan": "rules",
    "verify": "verify",
}

__all__ = ["convert", "export", "export_plan", "families", "load", "plan", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
