"""What many families share: entries for sizes and RoPE, rules for names that LLaMA and we have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..errors import NotExpressible, UnsupportedField
from ..ops import both, halves, rename, weight
from ..rules import Drop, Rule

LAYER = "model.layers.{i}"
QKV = tuple(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")
# transformers' own name for the class with a language-modelling head, for a config.json written afresh.
CAUSAL_LM = "LlmArchForCausalLM"


def _token(native: Any, name: str) -> Any:
    value = getattr(native, name, None)
    # Old releases wrote -1 for "none".
    return None if value is not None and value == -1 else value


_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")

TOKENS: list[Entry] = [
    Derived(
        _TOKENS,
        to_ours=lambda native: {name: _token(native, name) for name in _TOKENS},
        to_theirs=lambda config: {name: getattr(config, name) for name in _TOKENS},
    ),
    Field("tie_word_embeddings"),
    Field("initializer_range"),
    Field("vocab_size"),
]

# Of families whose heads have each a key and value of their own.
EQUAL_HEADS: list[Entry] = [
    *TOKENS,
    Field("hidden_size"),
    Field("num_hidden_layers"),
    Field("intermediate_size"),
    Field("max_position_embeddings"),
    Field("num_attention_heads"),
]
# Of families that drop out nothing inside attention.
SIZES_ALONE: list[Entry] = [*EQUAL_HEADS, Field("num_key_value_heads")]
SIZES: list[Entry] = [*SIZES_ALONE, Field("attention_dropout")]
HEAD_DIM: list[Entry] = [Field("head_dim")]


def _full_rope(native: Any) -> Values:
    parameters = dict(native.rope_parameters)
    if parameters.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise UnsupportedField("partial_rotary_factor: transformers' class of this family rotates whole heads.")
    return {"rope_parameters": parameters}


def _rope_to_theirs(config: Any) -> Values:
    """Both spellings: `rope_parameters` for transformers 5, `rope_theta` and `rope_scaling` for 4."""
    if any(parameters["rope_type"] == "ntk" for parameters in config.rope_by_layer_type.values() if parameters):
        raise NotExpressible("rope_type='ntk' is ours alone. Elsewhere it is said as rope_theta * factor^(d/(d-2)).")
    parameters = config.rope_parameters or {}
    if "rope_theta" not in parameters:
        return {"rope_parameters": parameters}
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return {
        "rope_parameters": parameters,
        "rope_theta": parameters["rope_theta"],
        "rope_scaling": scaling if parameters["rope_type"] != "default" else None,
    }


def partial_rope(theta: str, factor: str) -> Callable[[Any], Values]:
    """As above for a family that may rotate a part of a head, with its own names for the base and the part."""

    def to_theirs(config: Any) -> Values:
        values = _rope_to_theirs(config)
        parameters = {"partial_rotary_factor": 1.0, **values["rope_parameters"]}
        return {
            "rope_parameters": parameters,
            "rope_scaling": values.get("rope_scaling"),
            theta: values.get("rope_theta"),
            factor: parameters["partial_rotary_factor"],
        }

    return to_theirs


_ROPE_NAMES = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor")
ROPE: list[Entry] = [Derived(_ROPE_NAMES, _full_rope, _rope_to_theirs)]
PARTIAL_ROPE: list[Entry] = [
    Derived(
        _ROPE_NAMES,
        to_ours=lambda native: {"rope_parameters": native.rope_parameters},
        to_theirs=partial_rope("rope_theta", "partial_rotary_factor"),
    )
]


def ropes_by_layer_type(local_base: str | None = None) -> Derived:
    """A RoPE for each type of layer, in both spellings: as in transformers 5 and in 4.

    Args:
        local_base: what 4 calls the base of windowed layers, where it may be another than the full ones'.
    """

    def to_theirs(config: Any) -> Values:
        by_type = config.rope_by_layer_type
        full, sliding = by_type.get("full_attention") or {}, by_type.get("sliding_attention") or {}
        scaling = {name: value for name, value in full.items() if name != "rope_theta"}
        return {
            "rope_parameters": by_type,
            **({"rope_theta": full["rope_theta"]} if full else {}),
            **({local_base: sliding["rope_theta"]} if sliding and local_base else {}),
            "rope_scaling": scaling if full.get("rope_type", "default") != "default" else None,
        }

    return Derived(
        ("rope_parameters", "rope_theta", "rope_scaling", *([local_base] if local_base else [])),
        to_ours=lambda native: {"rope_parameters": native.rope_parameters},
        to_theirs=to_theirs,
    )


RMS_NORM: list[Entry] = [Field("rms_norm_eps", "norm_eps")]
LLAMA_CONFIG: list[Entry] = [*SIZES, *HEAD_DIM, *ROPE, *RMS_NORM, Field("hidden_act")]
LAYER_NORM_MLP: list[Entry] = [Const("norm_type", "layernorm"), Const("ffn_type", "mlp")]
ALL_BIASES: list[Entry] = [Const(name, True) for name in ("attention_bias", "attention_output_bias", "ffn_bias")]
# One flag of theirs for the four projections of attention, and one for the three of a feed-forward.
ATTENTION_BIAS: list[Entry] = [Field("attention_bias", "attention_bias", "attention_output_bias")]


MLP_BIAS: list[Entry] = [Field("mlp_bias", "ffn_bias")]


def windows(native: Any) -> Values:
    sliding = "sliding_attention" in native.layer_types
    return {"layer_types": native.layer_types, "sliding_window": native.sliding_window if sliding else None}


def full_layers(native: Any) -> list[int]:
    return [i for i, kind in enumerate(native.layer_types) if kind == "full_attention"]


# Windowed layers rotate and full ones know no position.
FULL_WITHOUT_POSITION = Derived((), lambda native: {"nope_layers": full_layers(native)}, lambda config: {})


def first_of_the_sliding_tail(layer_types: list[str]) -> int:
    """Where the last run of sliding layers begins; older readers slide from there on."""
    sliding = [kind == "sliding_attention" for kind in layer_types]
    return len(sliding) - next((n for n, slides in enumerate(reversed(sliding)) if not slides), len(sliding))


# Qwen's windows: a switch, a width, and the first layer that slides.
SLIDING_TAIL: list[Entry] = [
    Derived(
        ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        windows,
        lambda config: {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": first_of_the_sliding_tail(config.layer_types),
            "layer_types": config.layer_types,
        },
    )
]
# Gemma's windows: a width, and a list of layers that slide.
LAYER_TYPES: list[Entry] = [
    Derived(
        ("sliding_window", "layer_types"),
        windows,
        lambda config: {"sliding_window": config.sliding_window, "layer_types": config.layer_types},
    )
]


def _width_where_there_is_a_window(config: Any) -> Values:
    width = {} if config.sliding_window is None else {"sliding_window": config.sliding_window}
    return {"layer_types": config.layer_types, **width}


# The same of classes that make a windowed mask even where no layer reads it, and so need a width, and have one.
MASKED_LAYER_TYPES: list[Entry] = [Derived(("sliding_window", "layer_types"), windows, _width_where_there_is_a_window)]

HEAD: list[Rule] = [*weight("model.embed_tokens", "model.embed_tokens"), *both("lm_head", "lm_head")]
ATTENTION: list[Rule] = [rule for part in "qkvo" for rule in both(f"{LAYER}.self_attn.{part}_proj")]
QK_NORM: list[Rule] = [rule for part in "qk" for rule in weight(f"{LAYER}.self_attn.{part}_norm")]
MLP: list[Rule] = [rule for part in ("gate", "up", "down") for rule in both(f"{LAYER}.mlp.{part}_proj")]
# Gate and up in one projection.
FUSED_MLP: list[Rule] = [
    *weight(f"{LAYER}.mlp.gate_up_proj", [f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"], halves),
    *weight(f"{LAYER}.mlp.down_proj"),
]
SINKS: list[Rule] = [Rule((f"{LAYER}.self_attn.sinks",), (f"{LAYER}.self_attn.sinks",), rename)]
PRE_NORMS: list[Rule] = [
    *both(f"{LAYER}.input_layernorm", f"{LAYER}.attn_norm.pre"),
    *both(f"{LAYER}.post_attention_layernorm", f"{LAYER}.mlp_norm.pre"),
    *both("model.norm", "model.norm"),
]
# Of norms that stand only after each branch (OLMo 2).
BRANCH_NORMS: list[Rule] = [
    *weight(f"{LAYER}.post_attention_layernorm", f"{LAYER}.attn_norm.post"),
    *weight(f"{LAYER}.post_feedforward_layernorm", f"{LAYER}.mlp_norm.post"),
    *weight("model.norm", "model.norm"),
]
LLAMA_WEIGHTS: list[Rule] = [*HEAD, *ATTENTION, *MLP, *PRE_NORMS]

# As LLaMA's release and as a bare base model writes names.
SPELLINGS: tuple[dict[str, str], ...] = ({}, {"model.": ""})

# Names of the GPT-J line, whose fields transformers reads by these names or by today's.
GPT_SIZES: list[Entry] = [
    *TOKENS,
    Field("n_embd", "hidden_size"),
    Field("n_layer", "num_hidden_layers"),
    Field("n_head", "num_attention_heads"),
    Field("n_positions", "max_position_embeddings"),
    Field("layer_norm_epsilon", "norm_eps"),
    Field("resid_pdrop", "hidden_dropout"),
    Field("embd_pdrop", "embedding_dropout"),
    Field("attn_pdrop", "attention_dropout"),
]
# Of their classification heads.
SUMMARY = (
    *("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
)


def mask_buffers(attention: str) -> list[Drop]:
    return [
        Drop(f"{attention}.bias", "causal mask, a constant"),
        Drop(f"{attention}.masked_bias", "the score of a masked position, a constant"),
    ]


ROTARY_BUFFERS = [
    Drop(f"{LAYER}.self_attn.rotary_emb.{name}", "RoPE table of transformers before 4.32: follows from rope_theta")
    for name in ("inv_freq", "cos_cached", "sin_cached")
]

# GPT-Neo's names of attention, two levels deep.
NEO_ATTENTION: list[Rule] = [
    rule
    for ours, theirs in {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}.items()
    for rule in both(f"transformer.h.{{i}}.attn.attention.{theirs}", f"{LAYER}.self_attn.{ours}_proj")
]
