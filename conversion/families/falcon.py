"""Falcon: three layouts of block and heads, RoPE or a scaled ALiBi. arXiv 2311.16867."""

from typing import Any

from ..entries import Derived, Field, Values
from ..errors import UnsupportedField
from ..ops import both, only, qkv_heads
from ..rules import Drop, Family
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, QKV, ROPE, TOKENS

BLOCK = "transformer.h.{i}"
_ROPE = ROPE[0]
# Of `model_type` RefinedWeb and RefinedWebModel.
OLD_NAMES = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"}


def _block(native: Any) -> Values:
    if native.new_decoder_architecture and not native.parallel_attn:
        raise UnsupportedField("new_decoder_architecture without parallel_attn: transformers cannot run that.")
    norms = native.num_ln_in_parallel_attn or 2 if native.new_decoder_architecture else 1
    return {"parallel_block": native.parallel_attn, "parallel_norms": norms}


def _keys(native: Any) -> int:
    if native.new_decoder_architecture:
        return native.num_kv_heads
    return 1 if native.multi_query else native.num_attention_heads


def _layout(native: Any) -> Values:
    return {**_block(native), "num_key_value_heads": _keys(native)}


def _layout_to_theirs(config: Any) -> Values:
    keys = config.num_key_value_heads
    new = config.parallel_norms == 2 or 1 < keys < config.num_attention_heads
    return {
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": config.parallel_norms if new else None,
        "parallel_attn": config.parallel_block,
        "multi_query": keys == 1,
        "num_kv_heads": keys,
    }


def _positions(native: Any) -> Values:
    if native.alibi:
        return {"position_encoding": "alibi", "alibi_scaled": True, "alibi_in_bf16": True}
    return _ROPE.to_ours(native)


def _positions_to_theirs(config: Any) -> Values:
    alibi = config.position_encoding == "alibi"
    return {"alibi": alibi, **({} if alibi else _ROPE.to_theirs(config))}


def native(**values: Any) -> Any:
    """transformers' config; the code on the Hub that came before it counted in other words."""
    from transformers import FalconConfig

    if "n_head_kv" in values:  # of 40B alone, and one of two layouts from the rest
        values = {"new_decoder_architecture": True, **values}
    return FalconConfig(**{OLD_NAMES.get(name, name): value for name, value in values.items()})


def _two_norms(config: Any) -> bool:
    return config.parallel_norms == 2


def _other_norms(config: Any) -> bool:
    return not _two_norms(config)


FAMILY = Family(
    "falcon",
    config=[
        *TOKENS,
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("max_position_embeddings"),
        Field("ffn_hidden_size", "intermediate_size"),
        Field("activation", "hidden_act"),
        Field("layer_norm_epsilon", "norm_eps"),
        Field("hidden_dropout"),
        Field("attention_dropout"),
        Field("bias", "attention_bias", "attention_output_bias", "ffn_bias"),
        *LAYER_NORM_MLP,
        Derived(
            ("new_decoder_architecture", "num_ln_in_parallel_attn", "parallel_attn", "multi_query", "num_kv_heads"),
            _layout,
            _layout_to_theirs,
        ),
        Derived(("alibi", *_ROPE.theirs), _positions, _positions_to_theirs),
    ],
    weights=[
        *both("transformer.word_embeddings", "model.embed_tokens"),
        *only(_two_norms, both(f"{BLOCK}.ln_attn", f"{LAYER}.attn_norm.pre")),
        *only(_two_norms, both(f"{BLOCK}.ln_mlp", f"{LAYER}.mlp_norm.pre")),
        *only(_other_norms, both(f"{BLOCK}.input_layernorm", f"{LAYER}.attn_norm.pre")),
        *only(_other_norms, both(f"{BLOCK}.post_attention_layernorm", f"{LAYER}.mlp_norm.pre")),
        *both(f"{BLOCK}.self_attention.query_key_value", QKV, qkv_heads),
        *both(f"{BLOCK}.self_attention.dense", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.mlp.dense_h_to_4h", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.dense_4h_to_h", f"{LAYER}.mlp.down_proj"),
        *both("transformer.ln_f", "model.norm"),
        *both("lm_head", "lm_head"),
    ],
    drops=[
        Drop(f"{BLOCK}.self_attention.rotary_emb.inv_freq", "RoPE table of older releases: follows from rope_theta")
    ],
    architectures={CAUSAL_LM: "FalconForCausalLM"},
    native=native,
)
