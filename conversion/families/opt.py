"""OPT: learned positions from row 2 on, ReLU; norms before each branch, or after it. arXiv 2205.01068."""

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..errors import UnsupportedField
from ..ops import both
from ..rules import Family
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, TOKENS

BLOCK = "model.decoder.layers.{i}"


def _norms(native: Any) -> Values:
    before = native.do_layer_norm_before
    return {"norm_placement": "pre" if before else "post", "final_norm": before and not native._remove_final_layer_norm}


def _norms_to_theirs(config: Any) -> Values:
    before = config.norm_placement == "pre"
    return {"do_layer_norm_before": before, "_remove_final_layer_norm": before and not config.final_norm}


def _same_width(native: Any) -> Values:
    if native.word_embed_proj_dim != native.hidden_size:
        raise UnsupportedField(
            f"word_embed_proj_dim={native.word_embed_proj_dim} beside hidden_size={native.hidden_size}: embeddings "
            "narrower than the model (OPT-350M) have no counterpart here."
        )
    return {"hidden_size": native.hidden_size}


FAMILY = Family(
    "opt",
    config=[
        *[entry for entry in TOKENS if "initializer_range" not in entry.theirs],
        Field("init_std", "initializer_range"),
        Derived(
            ("hidden_size", "word_embed_proj_dim"),
            _same_width,
            lambda config: {"hidden_size": config.hidden_size, "word_embed_proj_dim": config.hidden_size},
        ),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("ffn_dim", "intermediate_size"),
        Field("max_position_embeddings"),
        Field("activation_function", "hidden_act"),
        Field("dropout", "hidden_dropout"),
        Field("attention_dropout"),
        Field("enable_bias", "attention_bias", "attention_output_bias", "ffn_bias"),
        Derived(("do_layer_norm_before", "_remove_final_layer_norm"), _norms, _norms_to_theirs),
        *LAYER_NORM_MLP,
        Const("norm_eps", 1e-5),
        Const("position_encoding", "learned"),
        Const("position_offset", 2),
        Const("positions_follow_mask", True),
    ],
    weights=[
        *both("model.decoder.embed_tokens", "model.embed_tokens"),
        *both("model.decoder.embed_positions", "model.embed_positions"),
        *[rule for part in "qkv" for rule in both(f"{BLOCK}.self_attn.{part}_proj", f"{LAYER}.self_attn.{part}_proj")],
        *both(f"{BLOCK}.self_attn.out_proj", f"{LAYER}.self_attn.o_proj"),
        *[
            rule
            for slot in ("pre", "out")
            for rule in (
                *both(f"{BLOCK}.self_attn_layer_norm", f"{LAYER}.attn_norm.{slot}"),
                *both(f"{BLOCK}.final_layer_norm", f"{LAYER}.mlp_norm.{slot}"),
            )
        ],
        *both(f"{BLOCK}.fc1", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.fc2", f"{LAYER}.mlp.down_proj"),
        *both("model.decoder.final_layer_norm", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    spellings=({}, {"model.": ""}),
    architectures={CAUSAL_LM: "OPTForCausalLM"},
)
