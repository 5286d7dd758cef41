"""What encoders share: the fields and names of BERT's line, its task heads, and what old checkpoints hold besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..errors import UnsupportedField
from ..ops import both, only, rename, weight
from ..rules import Drop, Rule
from .common import ALL_BIASES, CAUSAL_LM, LAYER, LAYER_NORM_MLP, TOKENS
from .experts import always

MODEL, MASKED_LM = "LlmArchModel", "LlmArchForMaskedLM"
SEQUENCE, TOKEN, ANSWER = (
    f"LlmArchFor{task}" for task in ("SequenceClassification", "TokenClassification", "QuestionAnswering")
)

KEPT = "head that has no counterpart here; it is kept aside for a way back"


def named(theirs: str, *ours: str) -> dict[str, str]:
    """Our classes and theirs, which begin with the same word. The first is that of a config that names none."""
    return {name: name.replace("LlmArch", theirs) for name in ours}


def classes(theirs: str) -> dict[str, str]:
    """Those of an encoder."""
    return named(theirs, MASKED_LM, MODEL, SEQUENCE, TOKEN, ANSWER)


def task(config: Any) -> str:
    """What the class of a config is for, ours or theirs: MaskedLM, QuestionAnswering, …; for a bare model its name."""
    return str((config.architectures or [""])[0]).split("For")[-1]


def of_task(name: str, rules: Sequence[Rule]) -> list[Rule]:
    """Rules for one class alone, where two have tensors of one name."""
    return only(lambda config: task(config) == name, rules)


# -- config ------------------------------------------------------------------------------------------------------------

# Norms after each branch and after the embedding, none at the end.
NORMS_AFTER: list[Entry] = [
    Const("norm_placement", "post"),
    Const("embedding_norm", True),
    Const("final_norm", False),
]
# Biases everywhere.
POST_NORM: list[Entry] = [*LAYER_NORM_MLP, *ALL_BIASES, *NORMS_AFTER]


def norms_before(embedding_norm: bool) -> list[Entry]:
    """Norms before each branch and at the end, and perhaps after the embedding."""
    return [Const("norm_placement", "pre"), Const("embedding_norm", embedding_norm), Const("final_norm", True)]


LEARNED: list[Entry] = [
    Const("position_encoding", "learned"),
    # The relative encodings of old releases are gone from transformers 5, and were never ours.
    always("position_embedding_type", "absolute"),
]
# Of the heads: a dense layer, activation and norm before the vocabulary, and a bias on all last layers.
HEADS: list[Entry] = [Const("lm_head_transform", True), Const("lm_head_bias", True), Const("classifier_bias", True)]
BERT_FIELDS: list[Entry] = [
    *TOKENS,
    Field("hidden_size"),
    Field("num_hidden_layers"),
    Field("num_attention_heads"),
    Field("intermediate_size"),
    Field("hidden_act"),
    Field("type_vocab_size"),
    Field("layer_norm_eps", "norm_eps"),
    Field("hidden_dropout_prob", "hidden_dropout", "embedding_dropout"),
    Field("attention_probs_dropout_prob", "attention_dropout"),
    *HEADS,
]
# BERT's block but for its norms.
BERT_BLOCK: list[Entry] = [*BERT_FIELDS, *LAYER_NORM_MLP, *ALL_BIASES]
BERT_SIZES: list[Entry] = [*BERT_FIELDS, *POST_NORM]


def classifier_dropout(name: str | None = "classifier_dropout") -> Derived:
    """Dropout before a classifier: their field, else as in the blocks; a question answerer has none."""

    def to_ours(native: Any) -> Values:
        given = None if name is None else getattr(native, name)
        dropout = native.hidden_dropout_prob if given is None else given
        return {"classifier_dropout": 0.0 if task(native) == "QuestionAnswering" else dropout}

    def to_theirs(config: Any) -> Values:
        if name is None or task(config) == "QuestionAnswering":
            return {}
        return {name: config.classifier_dropout}

    return Derived((name,) if name else (), to_ours, to_theirs)


def own_embedding_width() -> Derived:
    """Embeddings may be narrower than the model; where they are not, there is no projection."""

    def to_ours(native: Any) -> Values:
        return {"embedding_size": None if native.embedding_size == native.hidden_size else native.embedding_size}

    return Derived(
        ("embedding_size",), to_ours, lambda config: {"embedding_size": config.embedding_size or config.hidden_size}
    )


def topology(theirs: str) -> Derived:
    """An encoder, or with `is_decoder` a causal model, for which they have a class of its own.

    Args:
        theirs: the name of that class.
    """

    def to_ours(native: Any) -> Values:
        if native.is_decoder != (native.architectures == [theirs]):
            raise UnsupportedField(
                f"is_decoder={native.is_decoder} with architectures={native.architectures}: a causal model is a "
                f"{theirs} here, and a {theirs} is causal."
            )
        return {"topology": "decoder" if native.is_decoder else "encoder"}

    return Derived(("is_decoder",), to_ours, lambda config: {"is_decoder": config.topology == "decoder"})


ENCODER: list[Entry] = [Const("topology", "encoder"), always("is_decoder", False)]
INERT = (
    # Of Google's configs, about pretraining.
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    "pooler_type",
    # Of old releases of transformers, and of tools that train and serve.
    *("_num_labels", "output_past", "eos_token_ids", "xla_device", "language", "name", "sentence_transformers"),
)

# The pooler is on disk or it is not; config.json does not say. What it makes, a classifier reads.
POOLER: tuple[Values, ...] = ({"pooler": True}, {"pooler": False})
READ_POOLER: tuple[Values, ...] = (
    {"pooler": True, "classifier_pooling": "pooler"},
    {"pooler": False, "classifier_pooling": "first"},
)


def variants(pooler: Sequence[Values], classifier: Sequence[Values]) -> dict[str, Sequence[Values]]:
    """For each class, poolers in the order in which they are likely, which decides where there are no tensors to ask.

    Args:
        pooler: with and without.
        classifier: those that a sequence classifier of theirs may be.
    """
    present, absent = pooler
    unlikely = (absent, present)
    return {
        MODEL: pooler,
        MASKED_LM: unlikely,
        TOKEN: unlikely,
        ANSWER: unlikely,
        SEQUENCE: classifier,
        CAUSAL_LM: (absent,),
    }


# -- weights -----------------------------------------------------------------------------------------------------------


def embeddings(theirs: str) -> list[Rule]:
    return [
        *weight(f"{theirs}.word_embeddings", "model.embed_tokens"),
        *weight(f"{theirs}.position_embeddings", "model.embed_positions"),
        *weight(f"{theirs}.token_type_embeddings", "model.embed_types"),
        *both(f"{theirs}.LayerNorm", "model.embed_norm"),
    ]


def bert_weights(model: str) -> list[Rule]:
    """Embeddings, projection, blocks and pooler of a base model that is called `model` in the others."""
    block = f"{model}.encoder.layer.{{i}}"
    parts = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
    return [
        *embeddings(f"{model}.embeddings"),
        *both(f"{model}.embeddings_project", "model.embed_projection"),
        *[
            rule
            for ours, theirs in parts.items()
            for rule in both(f"{block}.attention.{theirs}", f"{LAYER}.self_attn.{ours}_proj")
        ],
        *both(f"{block}.attention.output.LayerNorm", f"{LAYER}.attn_norm.out"),
        *both(f"{block}.intermediate.dense", f"{LAYER}.mlp.up_proj"),
        *both(f"{block}.output.dense", f"{LAYER}.mlp.down_proj"),
        *both(f"{block}.output.LayerNorm", f"{LAYER}.mlp_norm.out"),
        *both(f"{model}.pooler.dense", "model.pooler.dense"),
    ]


def norms_where(attention: str, feed_forward: str, final: str) -> list[Rule]:
    """The norms of a BERT that has them before its branches, by name."""
    return [
        *both(attention, f"{LAYER}.attn_norm.pre"),
        *both(feed_forward, f"{LAYER}.mlp_norm.pre"),
        *both(final, "model.norm"),
    ]


def classifier_dense(theirs: str) -> list[Rule]:
    """The dense layer before a sequence classifier."""
    return both(theirs, "head.dense")


def head(dense: str, norm: str, decoder: str) -> list[Rule]:
    """A head over the vocabulary whose last layer has weight and bias of its own."""
    return [*both(dense, "transform.dense"), *both(norm, "transform.norm"), *both(decoder, "lm_head")]


def _tied(config: Any) -> bool:
    return bool(config.tie_word_embeddings)


def head_with_own_bias(dense: str, norm: str, decoder: str, bias: str) -> list[Rule]:
    """A head that holds its bias twice: beside its last layer, and in it. They are one where the weight is tied; where
    it is not, the one beside is not read."""
    return [
        *both(dense, "transform.dense"),
        *both(norm, "transform.norm"),
        *weight(decoder, "lm_head"),
        *only(_tied, [Rule((bias,), ("lm_head.bias",), rename)]),
        *only(lambda config: not _tied(config), [Rule((f"{decoder}.bias",), ("lm_head.bias",), rename)]),
    ]


# -- on disk -----------------------------------------------------------------------------------------------------------

# As TensorFlow called the two halves of a norm; checkpoints of the first years have kept it.
GAMMA_BETA = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}


def spellings(*options: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """Every combination of options that a checkpoint may have chosen each by itself."""
    choices = product(*(({}, option) for option in options))
    return tuple({name: new for option in chosen for name, new in option.items()} for chosen in choices)


def bias_spellings(decoder: str, bias: str) -> tuple[dict[str, str], ...]:
    """Where one of the two names of the bias is on disk, it may be either."""
    return {bias: f"{decoder}.bias"}, {f"{decoder}.bias": bias}


def constants(embeddings: str) -> list[Drop]:
    return [
        Drop(f"{embeddings}.position_ids", "0, 1, 2, …, a constant"),
        Drop(f"{embeddings}.token_type_ids", "zeros, a constant"),
    ]


def kept(*modules: str, what: str = KEPT) -> list[Drop]:
    """Weights and biases that others may want."""
    return [Drop(f"{module}.{part}", what, keep=True) for module in modules for part in ("weight", "bias")]
