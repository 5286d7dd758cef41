"""GLM-4.5 and 4.6: GLM's half-rotated heads with DeepSeek-V3's experts. arXiv 2508.06471.

The same without dense layers: Solar Open 100B (Upstage 2026); under other names on disk: Sarvam-30B (Sarvam AI 2026).
"""

from typing import Any

from ..entries import Derived, Entry, Field
from ..ops import qkv_rows, weight
from ..rules import Rule
from .common import (
    CAUSAL_LM,
    HEAD_DIM,
    LAYER,
    LLAMA_WEIGHTS,
    MLP,
    PARTIAL_ROPE,
    PRE_NORMS,
    QK_NORM,
    QKV,
    RMS_NORM,
    SIZES,
)
from .decoders import decoder
from .deepseek_v2 import DENSE_FIRST, FINE_EXPERTS, FINE_WEIGHTS
from .deepseek_v3 import LAYERS_AHEAD, NO_LAYERS_AHEAD, SELECTION_BIAS, SIGMOID_ROUTER
from .experts import LOSS_OUTPUT, ONLY_EXPERTS, selection_bias


def _qk_norm(native: Any) -> dict[str, Any]:
    return {"qk_norm": "head" if native.use_qk_norm else "none"}


SOLAR: list[Entry] = [
    *SIZES,
    *HEAD_DIM,
    *PARTIAL_ROPE,
    *RMS_NORM,
    Field("hidden_act"),
    Field("attention_bias"),
    *FINE_EXPERTS,
    *SIGMOID_ROUTER,
]
GLM: list[Entry] = [
    *SOLAR,
    *DENSE_FIRST,
    NO_LAYERS_AHEAD,
    Derived(("use_qk_norm",), _qk_norm, lambda config: {"use_qk_norm": config.qk_norm == "head"}),
]
GLM_WEIGHTS: list[Rule] = [*LLAMA_WEIGHTS, *QK_NORM, *FINE_WEIGHTS, *SELECTION_BIAS]
ATTENTION = "model.layers.{i}.attention"
SARVAM_WEIGHTS: list[Rule] = [
    *weight("model.word_embeddings", "model.embed_tokens"),
    *weight(f"{ATTENTION}.query_key_value", QKV, qkv_rows),
    *weight(f"{ATTENTION}.dense", f"{LAYER}.self_attn.o_proj"),
    *weight(f"{ATTENTION}.query_layernorm", f"{LAYER}.self_attn.q_norm"),
    *weight(f"{ATTENTION}.key_layernorm", f"{LAYER}.self_attn.k_norm"),
    *PRE_NORMS,
    *MLP,
    *FINE_WEIGHTS,
    *selection_bias(f"{LAYER}.mlp.gate.expert_bias"),
    *weight("lm_head"),
]

FAMILIES = (
    decoder(
        "glm4_moe",
        "Glm4Moe",
        GLM,
        GLM_WEIGHTS,
        drops=LAYERS_AHEAD,
        layers_ahead="num_nextn_predict_layers",
        inert=LOSS_OUTPUT,
    ),
    decoder("solar_open", "SolarOpen", [*SOLAR, *ONLY_EXPERTS], GLM_WEIGHTS, inert=LOSS_OUTPUT),
    # transformers has no class for it but GLM's, and saves a base model under names that nobody else uses.
    decoder(
        "sarvam_moe",
        "Glm4Moe",
        GLM,
        SARVAM_WEIGHTS,
        architectures={CAUSAL_LM: "Glm4MoeForCausalLM"},
        inert=(*LOSS_OUTPUT, "moe_router_enable_expert_bias"),
    ),
)
