"""XGLM: sinusoids from row 2 on, norms before each branch, in thirty languages. arXiv 2112.10668."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..errors import UnsupportedField
from ..ops import both
from ..rules import Rule
from .common import LAYER, LAYER_NORM_MLP, TOKENS
from .decoders import decoder


def scaled(native: Any) -> Values:
    return {"embedding_scale": native.hidden_size**0.5 if native.scale_embedding else 1.0}


def _padding(native: Any) -> Values:
    """Their table is zero in padding's row, which no position reaches as long as it is before the first."""
    if native.pad_token_id is not None and native.pad_token_id >= 2:
        raise UnsupportedField(f"pad_token_id={native.pad_token_id}: positions begin at row 2, and its row is zero.")
    return {}


# Of fairseq's decoders: embeddings times sqrt(width) or not, and biases everywhere.
FAIRSEQ: list[Entry] = [
    Derived(("scale_embedding",), scaled, lambda config: {"scale_embedding": config.embedding_scale != 1.0}),
    Field("activation_dropout", "ffn_dropout"),
    *LAYER_NORM_MLP,
    *[Const(name, True) for name in ("attention_bias", "attention_output_bias", "ffn_bias")],
    Const("position_offset", 2),
]


def fairseq_block(block: str) -> list[Rule]:
    return [
        *[
            rule
            for ours, theirs in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items()
            for rule in both(f"{block}.self_attn.{theirs}", f"{LAYER}.self_attn.{ours}_proj")
        ],
        *both(f"{block}.self_attn_layer_norm", f"{LAYER}.attn_norm.pre"),
        *both(f"{block}.fc1", f"{LAYER}.mlp.up_proj"),
        *both(f"{block}.fc2", f"{LAYER}.mlp.down_proj"),
        *both(f"{block}.final_layer_norm", f"{LAYER}.mlp_norm.pre"),
    ]


FAMILY = decoder(
    "xglm",
    "XGLM",
    [
        *[entry for entry in TOKENS if "initializer_range" not in entry.theirs],
        Field("init_std", "initializer_range"),
        Field("decoder_start_token_id"),
        Field("d_model", "hidden_size"),
        Field("num_layers", "num_hidden_layers"),
        Field("attention_heads", "num_attention_heads"),
        Field("ffn_dim", "intermediate_size"),
        Field("max_position_embeddings"),
        Field("activation_function", "hidden_act"),
        Field("dropout", "hidden_dropout", "embedding_dropout"),
        Field("attention_dropout"),
        *FAIRSEQ,
        Derived((), _padding, lambda config: {}),
        Const("norm_eps", 1e-5),
        Const("position_encoding", "sinusoidal"),
        Const("sinusoidal_layout", "halves"),
        Const("sinusoidal_endpoint", True),
    ],
    [
        *both("model.embed_tokens"),
        *fairseq_block("model.layers.{i}"),
        *both("model.layer_norm", "model.norm"),
        *both("lm_head"),
    ],
    # Layers left out at random are so in training alone.
    inert=("layerdrop",),
)
