"""Surgery: the same model with another architecture."""

from .experts_layout import convert_experts_layout, with_experts_layout

__all__ = ["convert_experts_layout", "with_experts_layout"]
