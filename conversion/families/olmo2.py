"""OLMo 2: norms only after each branch, and on all query and key heads together. arXiv 2501.00656."""

from ..entries import Const
from ..ops import weight
from ..rules import Family
from .common import ATTENTION, ATTENTION_BIAS, CAUSAL_LM, HEAD, LAYER, LLAMA_CONFIG, MLP, QK_NORM, SPELLINGS

FAMILY = Family(
    "olmo2",
    config=[
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Const("norm_placement", "branch"),
        Const("norm_weight_in_fp32", True),
        Const("qk_norm", "projection"),
    ],
    weights=[
        *HEAD,
        *ATTENTION,
        *QK_NORM,
        *MLP,
        *weight(f"{LAYER}.post_attention_layernorm", f"{LAYER}.attn_norm.post"),
        *weight(f"{LAYER}.post_feedforward_layernorm", f"{LAYER}.mlp_norm.post"),
        *weight("model.norm", "model.norm"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Olmo2ForCausalLM"},
)
