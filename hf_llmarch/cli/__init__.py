"""The command line, and the demo that shows it."""

from .app import main

__all__ = ["main"]
