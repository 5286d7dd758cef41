"""RoBERTa: BERT whose positions count from behind the padding token's row, on real tokens alone. arXiv 1907.11692.

The same in other languages or trained otherwise: XLM-RoBERTa (arXiv 1911.02116), CamemBERT (1911.03894), data2vec
(2202.03555). With norms before each branch: XLM-RoBERTa-XL (2105.00572), RoBERTa-PreLayerNorm (1806.00187).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..entries import Const, Derived, Entry, Values
from ..errors import UnsupportedField
from ..ops import both
from ..rules import Drop, Family, Rule
from .common import CAUSAL_LM
from .encoders import (
    BERT_BLOCK,
    GAMMA_BETA,
    INERT,
    LEARNED,
    NORMS_AFTER,
    POOLER,
    bert_weights,
    bias_spellings,
    classes,
    classifier_dense,
    classifier_dropout,
    constants,
    head_with_own_bias,
    norms_before,
    norms_where,
    of_task,
    spellings,
    topology,
    variants,
)

BIAS = ("lm_head.decoder", "lm_head.bias")


def _positions(native: Any) -> Values:
    """Row pad_token_id is padding's, and the first token's the one after; their count includes the rows before it."""
    if native.pad_token_id is None:
        raise UnsupportedField("pad_token_id=None: positions are counted from behind it.")
    offset = native.pad_token_id + 1
    return {"position_offset": offset, "max_position_embeddings": native.max_position_embeddings - offset}


POSITIONS: list[Entry] = [
    *LEARNED,
    Const("positions_skip_padding", True),
    Derived(
        ("max_position_embeddings",),
        _positions,
        lambda config: {"max_position_embeddings": config.max_position_embeddings + config.position_offset},
    ),
]


# Of the heads, beside BERT's entries.
ROBERTA_HEADS: list[Entry] = [
    classifier_dropout(),
    Const("head_act", "gelu"),
    Const("classifier_pooling", "first"),
    Const("classifier_dense", True),
    Const("classifier_input_dropout", True),
]
HEAD_WEIGHTS: list[Rule] = [
    *head_with_own_bias("lm_head.dense", "lm_head.layer_norm", *BIAS),
    *classifier_dense("classifier.dense"),
    *of_task("SequenceClassification", both("classifier.out_proj", "score")),
    *of_task("TokenClassification", both("classifier", "score")),
    *both("qa_outputs"),
]
UNREAD_BIAS = Drop(BIAS[1], "not read where the head is not tied", keep=True)


def family(
    name: str,
    theirs: str,
    model: str = "roberta",
    *,
    norms: Sequence[Entry] = NORMS_AFTER,
    weights: Sequence[Rule] = (),
) -> Family:
    """RoBERTa, or one of those that differ from it in little.

    Args:
        theirs: what their classes' names begin with.
        model: what the names of a base model's tensors begin with.
        norms, weights: where its norms are, if not after each branch, and what they are called.
    """
    return Family(
        name,
        config=[*BERT_BLOCK, *norms, *POSITIONS, topology(f"{theirs}ForCausalLM"), *ROBERTA_HEADS],
        weights=[*bert_weights(model), *weights, *HEAD_WEIGHTS],
        drops=[*constants(f"{model}.embeddings"), UNREAD_BIAS],
        spellings=spellings({f"{model}.": ""}, GAMMA_BETA, *bias_spellings(*BIAS)),
        architectures={**classes(theirs), CAUSAL_LM: f"{theirs}ForCausalLM"},
        variants=variants(POOLER, POOLER[::-1]),
        copies={BIAS[1]: (f"{BIAS[0]}.bias",)},
        inert=INERT,
    )


_BLOCK = "encoder.layer.{i}"

FAMILY = family("roberta", "Roberta")
FAMILIES = (
    FAMILY,
    family("xlm-roberta", "XLMRoberta"),
    family("camembert", "Camembert"),
    family("data2vec-text", "Data2VecText", "data2vec_text"),
    family(
        "xlm-roberta-xl",
        "XLMRobertaXL",
        norms=norms_before(embedding_norm=False),
        weights=norms_where(
            f"roberta.{_BLOCK}.attention.self_attn_layer_norm",
            f"roberta.{_BLOCK}.LayerNorm",
            "roberta.encoder.LayerNorm",
        ),
    ),
    family(
        "roberta-prelayernorm",
        "RobertaPreLayerNorm",
        "roberta_prelayernorm",
        norms=norms_before(embedding_norm=True),
        weights=norms_where(
            f"roberta_prelayernorm.{_BLOCK}.attention.LayerNorm",
            f"roberta_prelayernorm.{_BLOCK}.intermediate.LayerNorm",
            "roberta_prelayernorm.LayerNorm",
        ),
    ),
)
