"""GPT-Neo: unscaled attention scores, full and windowed layers in turn, learned positions. EleutherAI 2021."""

from itertools import groupby
from typing import Any

from ..entries import Const, Derived, Field, Values
from ..ops import both
from ..rules import Family
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, NEO_ATTENTION, TOKENS, mask_buffers

BLOCK = "transformer.h.{i}"
KINDS = {"global": "full_attention", "local": "sliding_attention"}
NAMES = {kind: name for name, kind in KINDS.items()}


def _layers(native: Any) -> Values:
    kinds = [KINDS[name] for name in native.attention_layers]
    return {"layer_types": kinds, "sliding_window": native.window_size if "sliding_attention" in kinds else None}


def _layers_to_theirs(config: Any) -> Values:
    """A list of [[names], repetitions]; each run of equal layers becomes one of them."""
    runs = [(kind, len(list(run))) for kind, run in groupby(config.layer_types)]
    window = {} if config.sliding_window is None else {"window_size": config.sliding_window}
    return {"attention_types": [[[NAMES.get(kind, "global")], count] for kind, count in runs], **window}


FAMILY = Family(
    "gpt_neo",
    config=[
        *TOKENS,
        Field("hidden_size"),
        Field("num_layers", "num_hidden_layers"),
        Field("num_heads", "num_attention_heads"),
        Field("intermediate_size"),
        Field("max_position_embeddings"),
        Field("activation_function", "hidden_act"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("resid_dropout", "hidden_dropout"),
        Field("embed_dropout", "embedding_dropout"),
        Field("attention_dropout"),
        Derived(("attention_types", "window_size"), _layers, _layers_to_theirs),
        *LAYER_NORM_MLP,
        Const("attention_output_bias", True),
        Const("ffn_bias", True),
        Const("attention_scale", 1.0),
        Const("scores_in_fp32", True),
        Const("position_encoding", "learned"),
    ],
    weights=[
        *both("transformer.wte", "model.embed_tokens"),
        *both("transformer.wpe", "model.embed_positions"),
        *both(f"{BLOCK}.ln_1", f"{LAYER}.attn_norm.pre"),
        *NEO_ATTENTION,
        *both(f"{BLOCK}.ln_2", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.c_fc", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.c_proj", f"{LAYER}.mlp.down_proj"),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    drops=mask_buffers(f"{BLOCK}.attn.attention"),
    spellings=({}, {"transformer.": ""}),
    architectures={CAUSAL_LM: "GPTNeoForCausalLM"},
    # attention_layers is attention_types written out.
    inert=("attention_layers",),
)
