"""Public checkpoints into models of ours and back out, byte for byte.

These functions share their names with modules; they are imported here, at once, so that the names mean the functions.
"""

from .convert import convert, export, load
from .families import families
from .rules import export_plan, plan
from .verify import verify

__all__ = ["convert", "export", "export_plan", "families", "load", "plan", "verify"]
