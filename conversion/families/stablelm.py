"""StableLM 2 and 3B: LLaMA with LayerNorm and a quarter of each head rotated. Stability AI 2023, arXiv 2402.17834."""

from ..entries import Const, Derived, Field
from ..ops import stack, weight
from ..rules import Family
from .common import CAUSAL_LM, LAYER, LLAMA_WEIGHTS, PARTIAL_ROPE, ROTARY_BUFFERS, SIZES, SPELLINGS

FAMILY = Family(
    "stablelm",
    config=[
        *SIZES,
        *PARTIAL_ROPE,
        Field("hidden_act"),
        Field("layer_norm_eps", "norm_eps"),
        Field("use_qkv_bias", "attention_bias"),
        Const("norm_type", "layernorm"),
        # A gain for each head, and no bias, unlike the other norms.
        Derived(
            ("qk_layernorm",),
            to_ours=lambda native: {"qk_norm": "heads", "qk_norm_bias": False} if native.qk_layernorm else {},
            to_theirs=lambda config: {"qk_layernorm": config.qk_norm != "none"},
        ),
        # One norm for both branches when they are parallel.
        Derived(
            ("use_parallel_residual",),
            to_ours=lambda native: {"parallel_block": native.use_parallel_residual},
            to_theirs=lambda config: {"use_parallel_residual": config.parallel_block},
        ),
    ],
    weights=[
        *LLAMA_WEIGHTS,
        *weight(f"{LAYER}.self_attn.q_layernorm.norms.{{h}}", f"{LAYER}.self_attn.q_norm", stack),
        *weight(f"{LAYER}.self_attn.k_layernorm.norms.{{k}}", f"{LAYER}.self_attn.k_norm", stack),
    ],
    drops=ROTARY_BUFFERS,
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "StableLmForCausalLM"},
)
