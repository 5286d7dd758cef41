"""What can go wrong in a conversion. Each message says what was found, where, and what to do next."""

from collections.abc import Collection


class ConversionError(ValueError):
    """Base of all errors that a conversion raises on purpose."""


class UnknownFamily(ConversionError):
    """The source's `model_type` has no entry in the table of families."""


class UnsupportedField(ConversionError):
    """The source's config has a field that would change the numbers and that its family does not map."""


class NotExpressible(ConversionError):
    """A family has no way to say what our config says."""


class PlanError(ConversionError):
    """The tensors on disk and the tensors of the model do not pair up one to one."""


class CheckpointError(ConversionError):
    """A checkpoint is incomplete, damaged, or contradicts itself."""


class DestinationError(ConversionError):
    """The destination cannot be written to, or holds something that would be lost."""


class DifferentModel(ConversionError):
    """A converted model is not the original, where it was to be put in the place of another."""


def some(names: Collection[str], limit: int = 5) -> str:
    """The first few names and how many there are in all, for an error message."""
    shown = ", ".join(list(names)[:limit])
    return shown if len(names) <= limit else f"{shown}, … ({len(names)} in all)"
