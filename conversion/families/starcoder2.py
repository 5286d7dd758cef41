"""StarCoder2: LayerNorm and a plain MLP in LLaMA's frame, biases, a window on every layer. arXiv 2402.19173."""

from ..entries import Field
from ..ops import both
from ..rules import Family
from .common import ATTENTION, CAUSAL_LM, HEAD, HEAD_DIM, LAYER, LAYER_NORM_MLP, PRE_NORMS, ROPE, SIZES, SPELLINGS

FAMILY = Family(
    "starcoder2",
    config=[
        *SIZES,
        *HEAD_DIM,
        *ROPE,
        Field("hidden_act"),
        Field("norm_epsilon", "norm_eps"),
        Field("residual_dropout", "hidden_dropout"),
        Field("embedding_dropout"),
        Field("sliding_window"),
        Field("use_bias", "attention_bias", "attention_output_bias", "ffn_bias"),
        *LAYER_NORM_MLP,
    ],
    weights=[
        *HEAD,
        *ATTENTION,
        *PRE_NORMS,
        *both(f"{LAYER}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *both(f"{LAYER}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
    ],
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "Starcoder2ForCausalLM"},
)
