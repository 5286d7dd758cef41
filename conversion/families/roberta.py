"""RoBERTa: BERT whose positions count from behind the padding token's row, on real tokens alone. arXiv 1907.11692."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Entry, Values
from ..errors import UnsupportedField
from ..ops import both
from ..rules import Drop, Family
from .common import CAUSAL_LM
from .encoders import (
    BERT_SIZES,
    GAMMA_BETA,
    LEARNED,
    POOLER,
    bert_weights,
    bias_spellings,
    classes,
    classifier_dense,
    classifier_dropout,
    constants,
    head_with_own_bias,
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


def family(name: str, theirs: str) -> Family:
    """RoBERTa, or one of those that differ from it in their data alone.

    Args:
        theirs: what their classes' names begin with.
    """
    return Family(
        name,
        config=[
            *BERT_SIZES,
            *POSITIONS,
            topology(f"{theirs}ForCausalLM"),
            classifier_dropout(),
            Const("head_act", "gelu"),
            Const("classifier_pooling", "first"),
            Const("classifier_dense", True),
            Const("classifier_input_dropout", True),
        ],
        weights=[
            *bert_weights("roberta"),
            *head_with_own_bias("lm_head.dense", "lm_head.layer_norm", *BIAS),
            *classifier_dense("classifier.dense"),
            *of_task("SequenceClassification", both("classifier.out_proj", "score")),
            *of_task("TokenClassification", both("classifier", "score")),
            *both("qa_outputs"),
        ],
        drops=[
            *constants("roberta.embeddings"),
            Drop(BIAS[1], "not read where the head is not tied", keep=True),
        ],
        spellings=spellings({"roberta.": ""}, GAMMA_BETA, *bias_spellings(*BIAS)),
        architectures={**classes(theirs), CAUSAL_LM: f"{theirs}ForCausalLM"},
        variants=variants(POOLER, POOLER[::-1]),
        copies={BIAS[1]: (f"{BIAS[0]}.bias",)},
    )


FAMILY = family("roberta", "Roberta")
