"""Surgery: the same model with another architecture, exactly where that is possible, with a receipt where it is not."""

from .context import extend_context, extend_positions, set_windows
from .depth import drop_layers, duplicate_layers
from .experts_layout import convert_experts_layout, with_experts_layout
from .heads import prune_heads, to_gqa, to_mha, to_mqa, widen_heads
from .latent import to_mla
from .merging import merge
from .mixture import experts_layout as change_experts_layout
from .mixture import merge_experts, prune_experts, split_ffn, to_dense, upcycle
from .operation import OPERATIONS, operate, operate_on_folder, read_recipe
from .receipt import Cost, Difference, Receipt
from .rewrites import (
    fold_norms,
    fold_scales,
    set_norm_offset,
    set_rope_layout,
    tie,
    to_rmsnorm,
    unfold_norms,
    untie,
)
from .subject import SurgeryError
from .vocabulary import grow_vocabulary, trim_vocabulary
from .width import prune_ffn, widen_ffn, widen_hidden

__all__ = [
    "OPERATIONS",
    "Cost",
    "Difference",
    "Receipt",
    "SurgeryError",
    "change_experts_layout",
    "convert_experts_layout",
    "drop_layers",
    "duplicate_layers",
    "extend_context",
    "extend_positions",
    "fold_norms",
    "fold_scales",
    "grow_vocabulary",
    "merge",
    "merge_experts",
    "operate",
    "operate_on_folder",
    "prune_experts",
    "prune_ffn",
    "prune_heads",
    "read_recipe",
    "set_norm_offset",
    "set_rope_layout",
    "set_windows",
    "split_ffn",
    "tie",
    "to_dense",
    "to_gqa",
    "to_mha",
    "to_mla",
    "to_mqa",
    "to_rmsnorm",
    "trim_vocabulary",
    "unfold_norms",
    "untie",
    "upcycle",
    "widen_ffn",
    "widen_heads",
    "widen_hidden",
    "with_experts_layout",
]
