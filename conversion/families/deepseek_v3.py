"""DeepSeek-V3 and R1, Moonlight: V2 with sigmoid scores, a bias to pick experts by, and a layer that looks further
ahead. arXiv 2412.19437.

Under a name of its own: Sarvam-105B (Sarvam AI 2026).
"""

from dataclasses import replace
from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..ops import rename
from ..rules import Drop, Family, Rule
from .common import CAUSAL_LM, LAYER, SPELLINGS
from .deepseek_v2 import DEEPSEEK_CONFIG, DEEPSEEK_WEIGHTS, FINE_EXPERTS, experts_after_dense, groups, groups_to_theirs
from .experts import ROUTER_STAYS_IN_FP32, always, as_theirs

BIAS = f"{LAYER}.mlp.gate.e_score_correction_bias"
EXTRA = "model.layers.{m}"
# Multi-token prediction: a block of the model's own kind, what brings its inputs together, and a head.
EXTRA_NAMES = (
    *("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"),
    *("input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}" for name in ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj")),
    *(f"self_attn.{name}" for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")),
    *(f"mlp.{name}" for name in ("gate", "gate_proj", "up_proj", "down_proj")),
    *(f"mlp.{kind}.{part}_proj" for kind in ("experts.{e}", "shared_experts") for part in ("gate", "up", "down")),
)
AHEAD = "predicts a token further ahead (multi-token prediction); the model itself does not read it"


def _group_score(native: Any) -> Values:
    values = groups(native)
    return {**values, "router_group_score": "top2"} if values else {}


SIGMOID_ROUTER: list[Entry] = [
    *ROUTER_STAYS_IN_FP32,
    Const("router_score", "sigmoid"),
    Const("router_selection_bias", True),
    Field("norm_topk_prob"),
    Derived(("n_group", "topk_group"), _group_score, groups_to_theirs),
    always("scoring_func", "sigmoid"),
    always("topk_method", "noaux_tc"),
]
# Of a model that came with such layers, the original config.json says so.
NO_LAYERS_AHEAD = as_theirs(
    ("num_nextn_predict_layers", "num_mtp_layers"), lambda config: {"num_nextn_predict_layers": 0}
)
SELECTION_BIAS: list[Rule] = [Rule((BIAS,), (BIAS,), rename)]
LAYERS_AHEAD = [
    Drop(f"{EXTRA}.mlp.gate.e_score_correction_bias", AHEAD, keep=True),
    *(Drop(f"{EXTRA}.{name}.weight", AHEAD, keep=True) for name in EXTRA_NAMES),
]

FAMILY = Family(
    "deepseek_v3",
    config=[
        *DEEPSEEK_CONFIG,
        Field("rope_interleave", "rope_interleaved"),
        *experts_after_dense(*FINE_EXPERTS, *SIGMOID_ROUTER),
        NO_LAYERS_AHEAD,
    ],
    weights=[*DEEPSEEK_WEIGHTS, *SELECTION_BIAS],
    drops=LAYERS_AHEAD,
    layers_ahead="num_nextn_predict_layers",
    spellings=SPELLINGS,
    architectures={CAUSAL_LM: "DeepseekV3ForCausalLM"},
)
FAMILIES = (
    FAMILY,
    replace(
        FAMILY,
        name="sarvam_mla",
        also={"SarvamMLAForCausalLM": CAUSAL_LM},
        inert=("q_head_dim",),  # the two widths of a head, together
    ),
)
