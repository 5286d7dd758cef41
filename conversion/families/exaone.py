"""EXAONE 3.0, 3.5 and Deep: LLaMA under GPT-Neo's names. arXiv 2408.03541, 2412.04862."""

from ..ops import weight
from ..rules import Family
from .common import ATTENTION_BIAS, CAUSAL_LM, LAYER, LLAMA_CONFIG, NEO_ATTENTION
from .experts import always

BLOCK = "transformer.h.{i}"
MLP = {"c_fc_0": "gate_proj", "c_fc_1": "up_proj", "c_proj": "down_proj"}

FAMILY = Family(
    "exaone",
    config=[*LLAMA_CONFIG, *ATTENTION_BIAS, always("mlp_bias", False), always("embed_dropout", 0.0)],
    weights=[
        *weight("transformer.wte", "model.embed_tokens"),
        *NEO_ATTENTION,
        *weight(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.pre"),
        *weight(f"{BLOCK}.ln_2", f"{LAYER}.mlp_norm.pre"),
        *[rule for theirs, ours in MLP.items() for rule in weight(f"{BLOCK}.mlp.{theirs}", f"{LAYER}.mlp.{ours}")],
        *weight("transformer.ln_f", "model.norm"),
        *weight("lm_head"),
    ],
    # transformers has no class for it but LLaMA's; LG's own is ExaoneForCausalLM.
    architectures={CAUSAL_LM: "LlamaForCausalLM"},
)
