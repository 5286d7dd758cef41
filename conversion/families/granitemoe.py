"""Granite 3 MoE: Granite with experts fused into two tensors a layer. IBM 2024."""

from ..entries import Entry
from ..ops import rename
from ..rules import Family, Rule
from .common import ATTENTION, ATTENTION_BIAS, CAUSAL_LM, HEAD, LAYER, LLAMA_CONFIG, PRE_NORMS, SPELLINGS
from .experts import (
    AUXILIARY_LOSS,
    LOSS_OUTPUT,
    ONLY_EXPERTS,
    ROUTER_IN_MODEL_DTYPE,
    packed_experts,
    router,
    routing,
)
from .granite import MULTIPLIERS

SPARSE = f"{LAYER}.block_sparse_moe"

GRANITE_MOE: list[Entry] = [
    *LLAMA_CONFIG,
    *ATTENTION_BIAS,
    *MULTIPLIERS,
    *routing("num_local_experts"),
    *ONLY_EXPERTS,
    *AUXILIARY_LOSS,
    *ROUTER_IN_MODEL_DTYPE,
]
FRAME: list[Rule] = [*HEAD, *ATTENTION, *PRE_NORMS]
SPARSE_WEIGHTS: list[Rule] = [
    *router(f"{SPARSE}.router.layer"),
    *packed_experts(f"{SPARSE}.input_linear.weight", f"{SPARSE}.output_linear.weight", rename, rename, ("", ".weight")),
]

FAMILY = Family(
    "granitemoe",
    config=GRANITE_MOE,
    weights=[*FRAME, *SPARSE_WEIGHTS],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "GraniteMoeForCausalLM"},
    inert=LOSS_OUTPUT,
)
