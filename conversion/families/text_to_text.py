"""What T5 and its descendants share: fields, and rules for blocks that number their parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..ops import both, only, weight
from ..rules import Drop, Rule
from .common import TOKENS
from .encoders import ANSWER, MODEL, SEQUENCE, TOKEN, named, of_task, task
from .stacks import HEAD_WEIGHTS, HEADS, SEQ2SEQ_LM, TOPOLOGY, Stack, each_stack, stacks

_T5_TOKENS = [entry for entry in TOKENS if not {"initializer_range", "tie_word_embeddings"} & set(entry.theirs)]


# One rate of theirs for every place.
DROPOUTS = tuple(f"{place}_dropout" for place in ("hidden", "embedding", "attention", "ffn", "final"))


def t5_config() -> list[Entry]:
    return [
        *_T5_TOKENS,
        Field("decoder_start_token_id"),
        Field("d_model", "hidden_size"),
        Field("d_kv", "head_dim"),
        Field("d_ff", "intermediate_size"),
        Field("num_heads", "num_attention_heads"),
        stacks(("num_hidden_layers", "num_layers", "num_decoder_layers")),
        *HEADS,
        Field("layer_norm_epsilon", "norm_eps"),
        Field("dropout_rate", *DROPOUTS),
        Field("relative_attention_num_buckets"),
        Field("relative_attention_max_distance"),
        TOPOLOGY,
        Const("position_encoding", "relative_bias"),
        Const("attention_scale", 1.0),
        Const("fp16_clamp", "branch"),
    ]


# `gated-gelu` means the tanh form; every other name is the activation's own.
_GATED = {"gelu_new": "gated-gelu"}


def _feed_forward(native: Any) -> Values:
    return {"ffn_type": "glu" if native.is_gated_act else "mlp", "hidden_act": native.dense_act_fn}


def _feed_forward_to_theirs(config: Any) -> Values:
    gated = config.ffn_type == "glu"
    name = _GATED.get(config.hidden_act, f"gated-{config.hidden_act}") if gated else config.hidden_act
    return {"feed_forward_proj": name, "dense_act_fn": config.hidden_act, "is_gated_act": gated}


# Their classes of dense layers say `_keep_in_fp32_modules = ["wo"]`.
OUTPUT_IN_FP32: list[Entry] = [Const("keep_in_fp32", ["ffn_output"])]


def feed_forward_kind() -> Derived:
    return Derived(("feed_forward_proj", "dense_act_fn", "is_gated_act"), _feed_forward, _feed_forward_to_theirs)


def _t5_stack(stack: Stack) -> list[Rule]:
    side, ours, layer = stack.theirs, stack.ours, stack.layer
    block = f"{side}.block.{layer[-3:]}.layer"
    attentions = (
        {"self": "SelfAttention", "cross": "EncDecAttention"} if side == "decoder" else {"self": "SelfAttention"}
    )
    last = len(attentions)
    dense = f"{block}.{last}.DenseReluDense"
    return [
        *[
            rule
            for n, (place, attention) in enumerate(attentions.items())
            for rule in (
                *[
                    rule
                    for part in "qkvo"
                    for rule in weight(f"{block}.{n}.{attention}.{part}", f"{layer}.{place}_attn.{part}_proj")
                ],
                *weight(f"{block}.{n}.layer_norm", f"{layer}.{'attn' if place == 'self' else place}_norm.pre"),
            )
        ],
        *only(lambda config: config.ffn_type == "mlp", weight(f"{dense}.wi", f"{layer}.mlp.up_proj")),
        *only(lambda config: config.ffn_type == "glu", weight(f"{dense}.wi_1", f"{layer}.mlp.up_proj")),
        *weight(f"{dense}.wi_0", f"{layer}.mlp.gate_proj"),
        *weight(f"{dense}.wo", f"{layer}.mlp.down_proj"),
        *weight(f"{block}.{last}.layer_norm", f"{layer}.mlp_norm.pre"),
        *weight(f"{side}.final_layer_norm", f"{ours}.norm"),
    ]


T5_WEIGHTS: list[Rule] = [
    *weight("shared", "model.embed_tokens"),
    *weight("lm_head", "lm_head"),
    *each_stack(_t5_stack),
]
T5_CLASSES = (SEQ2SEQ_LM, MODEL, SEQUENCE, TOKEN, ANSWER)
# mT5 and umT5 checkpoints may name T5's classes, which compute the same, and old ones the first name of the LM class.
T5_ALSO = {theirs: ours for ours, theirs in named("T5", *T5_CLASSES).items()}
T5_ALSO |= {"T5EncoderModel": MODEL, "T5WithLMHeadModel": SEQ2SEQ_LM}
# Their classifiers have a base model in them, under this name.
_BASE = "transformer."


def _wrapped(config: Any) -> bool:
    return task(config) in ("SequenceClassification", "TokenClassification")


def in_every_class(rules: Sequence[Rule]) -> list[Rule]:
    """A base model's rules for all classes, and the rules of the heads."""
    return [
        *only(lambda config: not _wrapped(config), rules),
        *only(_wrapped, [replace(rule, theirs=tuple(f"{_BASE}{name}" for name in rule.theirs)) for rule in rules]),
        *HEAD_WEIGHTS,
        *of_task("TokenClassification", both("classifier", "score")),
    ]


# The embedding is on disk once, or again for each stack.
T5_COPIES = {
    f"{base}shared.weight": tuple(f"{base}{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    for base in ("", _BASE)
}
# The shared embedding is on disk under a name of its own, or only under that of the encoder's embedding.
T5_SPELLINGS: tuple[dict[str, str], ...] = ({}, {"shared.": "encoder.embed_tokens."})

_BIAS = "layer.0.SelfAttention.relative_attention_bias"


def shared_bias() -> list[Rule]:
    """The table of each stack, which its first block holds."""
    return each_stack(
        lambda stack: weight(f"{stack.theirs}.block.0.{_BIAS}", f"{stack.ours}.embed_positions.relative_attention_bias")
    )


def bias_per_layer() -> list[Rule]:
    def table(stack: Stack) -> list[Rule]:
        i = stack.layer[-3:]
        return weight(f"{stack.theirs}.block.{i}.{_BIAS}", f"{stack.ours}.embed_positions.relative_attention_bias.{i}")

    return each_stack(table)


T5_DROPS = [
    Drop(
        f"{base}decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "left over from the first conversions: cross-attention has no position bias, and no class reads this one",
    )
    for base in ("", _BASE)
]
# A base model of theirs has a class of its own for the encoder alone.
BOTH_STACKS_OR_ONE: dict[str, tuple[Values, ...]] = {MODEL: ({"topology": "encoder-decoder"}, {"topology": "encoder"})}
# A head that config.json does not tie may be absent all the same; then it is the embedding.
T5_VARIANTS: dict[str, tuple[Values, ...]] = {
    SEQ2SEQ_LM: ({}, {"tie_word_embeddings": True}),
    **BOTH_STACKS_OR_ONE,
}
# The first is a factor on fresh weights; no release reads the others.
T5_INERT = ("initializer_factor",)
