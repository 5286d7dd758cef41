"""The command line, and the demo that shows it."""

from .app import main  # isort: skip
from . import surgery  # noqa: F401, it enters its commands into the app's table

__all__ = ["main"]
