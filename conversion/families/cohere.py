"""Command R and R+: a parallel block behind one norm without bias, interleaved RoPE, scaled logits. Cohere 2024."""

from typing import Any

from ..entries import Const, Derived, Entry, Field
from ..ops import both, weight
from ..rules import Family, Rule
from .common import ATTENTION, ATTENTION_BIAS, CAUSAL_LM, HEAD, HEAD_DIM, LAYER, MLP, QK_NORM, ROPE, SIZES, SPELLINGS

COHERE: list[Entry] = [
    *SIZES,
    *HEAD_DIM,
    *ROPE,
    Field("hidden_act"),
    *ATTENTION_BIAS,
    Field("layer_norm_eps", "norm_eps"),
    Field("logit_scale"),
    Const("norm_type", "layernorm"),
    Const("norm_bias", False),
    Const("norm_weight_in_fp32", True),
    Const("parallel_block", True),
    Const("rope_interleaved", True),
]

COHERE_WEIGHTS: list[Rule] = [
    *HEAD,
    *ATTENTION,
    *MLP,
    *weight(f"{LAYER}.input_layernorm", f"{LAYER}.attn_norm.pre"),
    *both("model.norm", "model.norm"),
]


def _qk_norm(native: Any) -> dict[str, Any]:
    return {"qk_norm": "heads" if native.use_qk_norm else "none"}


FAMILY = Family(
    "cohere",
    config=[
        *COHERE,
        Derived(("use_qk_norm",), _qk_norm, lambda config: {"use_qk_norm": config.qk_norm == "heads"}),
    ],
    weights=[*COHERE_WEIGHTS, *QK_NORM],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "CohereForCausalLM"},
)
