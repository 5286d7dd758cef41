"""EuroBERT: LLaMA that sees both sides, in three sizes and fifteen languages. arXiv 2503.05500."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..errors import UnsupportedField
from ..ops import both
from ..rules import Family
from .common import ATTENTION_BIAS, LLAMA_CONFIG, LLAMA_WEIGHTS, SPELLINGS
from .encoders import INERT, MASKED_LM, MODEL, SEQUENCE, TOKEN, classifier_dense, named, task

POOLINGS = {"bos": "first", "mean": "mean"}
_THEIR_POOLINGS = {ours: theirs for theirs, ours in POOLINGS.items()}


def _pooling(native: Any) -> Values:
    if task(native) != "SequenceClassification":
        return {}
    if native.classifier_pooling not in POOLINGS:
        raise UnsupportedField(
            f"classifier_pooling={native.classifier_pooling!r}: a classifier that reads every token and takes the mean "
            "of its logits has no counterpart here, where states are pooled first."
        )
    return {"classifier_pooling": POOLINGS[native.classifier_pooling]}


def _pooling_to_theirs(config: Any) -> Values:
    if task(config) != "SequenceClassification":
        return {}
    return {"classifier_pooling": _THEIR_POOLINGS.get(config.classifier_pooling)}


FAMILY = Family(
    "eurobert",
    config=[
        *LLAMA_CONFIG,
        *ATTENTION_BIAS,
        Field("mlp_bias", "ffn_bias", "lm_head_bias"),
        Const("topology", "encoder"),
        Derived(("classifier_pooling",), _pooling, _pooling_to_theirs),
        Const("classifier_dense", True),
        Const("classifier_act", "gelu"),
        Const("classifier_bias", True),
    ],
    weights=[*LLAMA_WEIGHTS, *classifier_dense("dense"), *both("classifier", "score")],
    spellings=SPELLINGS,
    architectures=named("EuroBert", MASKED_LM, MODEL, SEQUENCE, TOKEN),
    # The tokenizer's, and a switch of the authors' own code.
    inert=(*INERT, "mask_token_id", "mask_token", "pad_token", "bos_token", "eos_token", "clf_pooling"),
)
