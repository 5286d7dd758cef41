"""The command line, and the demo that shows it."""

from . import study  # noqa: F401  (registers its commands)
from .app import main

__all__ = ["main"]
