"""Public checkpoints into models of ours and back out, byte for byte.

What needs torch is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# At once: the function has the name of its package, which would otherwise take its place here.
from .families import families

if TYPE_CHECKING:
    from .certificate import verify
    from .engine import convert, export, load
    from .plans import export_plan, plan

# Name -> the module that has it.
_HOMES = {
    **dict.fromkeys(("convert", "export", "load"), "engine"),
    "verify": "certificate",
    **dict.fromkeys(("export_plan", "plan"), "plans"),
}

__all__ = ["convert", "export", "export_plan", "families", "load", "plan", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
