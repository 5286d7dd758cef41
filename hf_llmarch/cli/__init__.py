"""The command line, and the demo that shows it."""

from . import study, surgery  # noqa: F401  (they register their commands)
from .app import main

__all__ = ["main"]
