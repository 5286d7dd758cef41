"""What encoder-decoders share: sizes of two stacks in one config, one embedding for both, and the names of BART's line.

Ours is the decoder, `model.…` with its layers counted by `{i}`; the encoder in it is `model.encoder.…`, counted by
`{s}`. Some of their classes are one of the stacks alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..ops import both, only, row, weight
from ..rules import Drop, Rule
from .common import CAUSAL_LM, LAYER, LAYER_NORM_MLP, TOKENS
from .encoders import ANSWER, MODEL, SEQUENCE, classifier_dropout, of_task
from .experts import always

# transformers' own name for the class with a head over the vocabulary, for a config.json written afresh.
SEQ2SEQ_LM = "LlmArchForConditionalGeneration"
ENCODER = "model.encoder"
ENCODER_LAYER = f"{ENCODER}.layers.{{s}}"


@dataclass(frozen=True)
class Stack:
    """Where a stack of theirs is in ours.

    Attributes:
        theirs: what their names begin with.
        ours, layer: what our names begin with, and those of its layers.
        topologies: of which models of ours this is so.
    """

    theirs: str
    ours: str
    layer: str
    topologies: tuple[str, ...]


STACKS = (
    Stack("encoder", ENCODER, ENCODER_LAYER, ("encoder-decoder",)),
    Stack("decoder", "model", LAYER, ("encoder-decoder", "decoder")),
    Stack("encoder", "model", LAYER, ("encoder",)),
)


def each_stack(rules: Callable[[Stack], list[Rule]]) -> list[Rule]:
    """Rules written out for every place that a stack may have."""

    def there(stack: Stack) -> Callable[[Any], bool]:
        return lambda config: config.topology in stack.topologies

    return [rule for stack in STACKS for rule in only(there(stack), rules(stack))]


def topology_of(native: Any) -> str:
    """The stacks of a class of theirs, which follow from its name."""
    name = (native.architectures or [""])[0]
    if name.endswith("ForCausalLM"):
        return "decoder"
    return "encoder" if name.endswith(("EncoderModel", "ForTokenClassification")) else "encoder-decoder"


# Their classes of a single stack set the flag by themselves.
TOPOLOGY = Derived(
    ("is_encoder_decoder",),
    lambda native: {"topology": topology_of(native)},
    lambda config: {"is_encoder_decoder": config.topology == "encoder-decoder"},
)


def stacks(*sizes: tuple[str, str, str], encoder_is: Values | None = None) -> Derived:
    """Sizes that each stack has for itself, as (ours, the encoder's of theirs, the decoder's of theirs), and what their
    encoder alone always is."""
    always_so = encoder_is or {}

    def to_ours(native: Any) -> Values:
        if topology_of(native) == "encoder":
            return {**{ours: getattr(native, encoder) for ours, encoder, _ in sizes}, **always_so}
        own = {ours: getattr(native, decoder) for ours, _, decoder in sizes}
        if topology_of(native) == "decoder":
            return own
        source = {ours: getattr(native, encoder) for ours, encoder, _ in sizes}
        source = {ours: value for ours, value in source.items() if value != own[ours]}
        if "num_attention_heads" in source:
            # What follows from the number of heads follows from the stack's own.
            heads = source["num_attention_heads"]
            source |= {"num_key_value_heads": heads, "head_dim": native.hidden_size // heads}
        return {**own, "source_stack": {**source, **always_so} or None}

    def to_theirs(config: Any) -> Values:
        source = source_of(config)
        return {
            name: getattr(stack, ours)
            for ours, encoder, decoder in sizes
            for name, stack in ((encoder, source), (decoder, config))
        }

    return Derived(tuple(name for _, *theirs in sizes for name in theirs), to_ours, to_theirs)


def source_of(config: Any) -> Any:
    """The encoder's config; for a model without one its own, whose difference in topology is found later."""
    return config.source_config() if config.topology == "encoder-decoder" else config


def _scale(native: Any) -> Values:
    return {"embedding_scale": native.d_model**0.5 if native.scale_embedding else 1.0}


def scaled_embedding(config: Any) -> Values:
    return {"scale_embedding": config.embedding_scale != 1.0}


BART_SIZES = (
    ("num_hidden_layers", "encoder_layers", "decoder_layers"),
    ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"),
    ("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"),
)

# Without `vocab_size`, of which Marian may have two.
_BART_TOKENS = [entry for entry in TOKENS if not {"initializer_range", "vocab_size"} & set(entry.theirs)]


def bart_config(*sizes: tuple[str, str, str], pre_norm: bool) -> list[Entry]:
    """The fields of BART and its descendants.

    Args:
        sizes: that the stacks have each for itself, beside BART's own.
        pre_norm: norms before each branch and after each stack, or after each branch alone.
    """
    return [
        *_BART_TOKENS,
        Field("init_std", "initializer_range"),
        Field("decoder_start_token_id"),
        Field("d_model", "hidden_size"),
        Field("max_position_embeddings"),
        stacks(*BART_SIZES, *sizes, encoder_is={"fp16_clamp": "layer"}),
        Derived(("scale_embedding",), _scale, scaled_embedding),
        Field("activation_function", "hidden_act"),
        Field("dropout", "hidden_dropout", "embedding_dropout"),
        Field("attention_dropout"),
        Field("activation_dropout", "ffn_dropout"),
        TOPOLOGY,
        *LAYER_NORM_MLP,
        Const("norm_eps", 1e-5),
        Const("norm_placement", "pre" if pre_norm else "post"),
        Const("final_norm", pre_norm),
        *[Const(name, True) for name in ("attention_bias", "attention_output_bias", "ffn_bias")],
        # Of transformers before 4.0, when one class served the whole line.
        always("normalize_before", pre_norm),
        always("add_final_layer_norm", pre_norm),
    ]


LEARNED: list[Entry] = [
    Const("position_encoding", "learned"),
    Const("position_offset", 2),
    always("static_position_embeddings", False),
]
# Sines fill the first half of a row and cosines the second.
SINUSOIDS: list[Entry] = [
    Const("position_encoding", "sinusoidal"),
    Const("sinusoidal_layout", "halves"),
    always("static_position_embeddings", True),
]
EMBEDDING_NORM: list[Entry] = [Const("embedding_norm", True), always("normalize_embedding", True)]
NO_EMBEDDING_NORM: list[Entry] = [Const("embedding_norm", False), always("normalize_embedding", False)]

# Layers left out at random are so in training alone; the forced tokens belong to generation; the last follows from the
# counts of the two stacks.
BART_INERT = (
    *("decoder_layerdrop", "encoder_layerdrop", "forced_bos_token_id", "forced_eos_token_id", "num_hidden_layers"),
)


def _bart_stack(stack: Stack) -> list[Rule]:
    theirs, ours, layer = f"model.{stack.theirs}", stack.ours, stack.layer
    block = layer.replace(ours, theirs, 1)
    attentions = {"self_attn": "attn", "encoder_attn": "cross"}
    return [
        *weight(f"{theirs}.embed_positions", f"{ours}.embed_positions"),
        *both(f"{theirs}.layernorm_embedding", f"{ours}.embed_norm"),
        *[
            rule
            for name, place in attentions.items()
            for part, projection in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj"))
            for rule in both(
                f"{block}.{name}.{projection}", f"{layer}.{'self' if place == 'attn' else place}_attn.{part}_proj"
            )
        ],
        *[
            rule
            for name, place in {**attentions, "final": "mlp"}.items()
            for slot in ("pre", "out")
            for rule in both(f"{block}.{name}_layer_norm", f"{layer}.{place}_norm.{slot}")
        ],
        *both(f"{block}.fc1", f"{layer}.mlp.up_proj"),
        *both(f"{block}.fc2", f"{layer}.mlp.down_proj"),
        *both(f"{theirs}.layer_norm", f"{ours}.norm"),
    ]


BART_WEIGHTS: list[Rule] = [
    *weight("model.encoder.embed_tokens", f"{ENCODER}.embed_tokens"),
    *weight("lm_head", "lm_head"),
    Rule(("final_logits_bias",), ("lm_head.bias",), row),
    *each_stack(_bart_stack),
]


def embedding_shared(when: Callable[[Any], bool]) -> list[Rule]:
    """The decoder's embedding under a name for both stacks where that holds, else under its own."""
    return [
        *only(when, weight("model.shared", "model.embed_tokens")),
        *only(lambda config: not when(config), weight("model.decoder.embed_tokens", "model.embed_tokens")),
    ]


# A decoder alone has nothing to share.
SHARED_EMBEDDING = embedding_shared(lambda config: config.topology == "encoder-decoder")
# The embedding is on disk once, or again for each stack.
SHARED_COPIES = {"model.shared.weight": ("model.decoder.embed_tokens.weight",)}

# Classifiers read the decoder's state at the end token, through a dense layer with tanh.
HEADS: list[Entry] = [
    Const("classifier_pooling", "eos"),
    Const("classifier_dense", True),
    Const("classifier_input_dropout", True),
    Const("classifier_bias", True),
    classifier_dropout(),
]
HEAD_WEIGHTS: list[Rule] = [
    *both("classification_head.dense", "head.dense"),
    *of_task("SequenceClassification", both("classification_head.out_proj", "score")),
    *both("qa_outputs"),
]
# Our classes that BART's line has, of two stacks and of the decoder.
BART_CLASSES = (SEQ2SEQ_LM, MODEL, SEQUENCE, ANSWER, CAUSAL_LM)

LOGITS_BIAS: list[Entry] = [Const("lm_head_bias", True)]
# A base model has no head, and so no bias on the logits.
BART_VARIANTS = {
    SEQ2SEQ_LM: ({"lm_head_bias": True}, {"lm_head_bias": False}),
    CAUSAL_LM: ({"lm_head_bias": False},),
}
# A base model saved alone has no prefix.
BART_SPELLINGS: tuple[dict[str, str], ...] = ({}, {"model.": ""})

# A decoder alone is given nothing to read there, and its class has the weights all the same.
UNREAD_CROSS_ATTENTION = [
    Drop(f"model.decoder.layers.{{i}}.{module}.{part}", "cross-attention of a decoder that reads no encoder", keep=True)
    for module in ("encoder_attn_layer_norm", *(f"encoder_attn.{name}_proj" for name in ("q", "k", "v", "out")))
    for part in ("weight", "bias")
]
SIDES = ("encoder", "decoder")
FORMAT_NUMBERS = [Drop(f"model.{side}.version", "the number of fairseq's file format, a constant") for side in SIDES]


def sinusoid_tables(name: str) -> list[Drop]:
    return [
        Drop(
            f"model.{side}.embed_positions.{name}",
            "table of sinusoids: it follows from the width",
            keep=True,
        )
        for side in SIDES
    ]
