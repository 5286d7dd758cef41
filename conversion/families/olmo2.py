"""OLMo 2: norms only after each branch, and on all query and key heads together. arXiv 2501.00656."""

from ..entries import Const, Entry, Field
from ..rules import Family, Rule
from .common import (
    ATTENTION,
    ATTENTION_BIAS,
    BRANCH_NORMS,
    CAUSAL_LM,
    HEAD,
    HEAD_DIM,
    MLP,
    QK_NORM,
    RMS_NORM,
    ROPE,
    SIZES,
    SPELLINGS,
)

OLMO2: list[Entry] = [
    *SIZES,
    *HEAD_DIM,
    *RMS_NORM,
    Field("hidden_act"),
    *ATTENTION_BIAS,
    Const("norm_placement", "branch"),
    Const("norm_weight_in_fp32", True),
    Const("qk_norm", "projection"),
]
OLMO2_WEIGHTS: list[Rule] = [*HEAD, *ATTENTION, *QK_NORM, *MLP, *BRANCH_NORMS]

FAMILY = Family(
    "olmo2",
    config=[*OLMO2, *ROPE],
    weights=OLMO2_WEIGHTS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Olmo2ForCausalLM"},
)
