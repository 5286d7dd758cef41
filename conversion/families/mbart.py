"""mBART: BART with norms before each branch, and a last one after each stack. arXiv 2001.08210, 2008.00401."""

from typing import Any

from ..entries import Derived, Field, Values
from ..rules import Family
from .encoders import named
from .stacks import (
    BART_CLASSES,
    BART_INERT,
    BART_SPELLINGS,
    BART_VARIANTS,
    BART_WEIGHTS,
    EMBEDDING_NORM,
    FORMAT_NUMBERS,
    HEAD_WEIGHTS,
    HEADS,
    LEARNED,
    LOGITS_BIAS,
    SEQ2SEQ_LM,
    SHARED_COPIES,
    SHARED_EMBEDDING,
    UNREAD_CROSS_ATTENTION,
    bart_config,
    topology_of,
)


def _decoder_start(native: Any) -> Values:
    return {"wrap_decoder_start": True} if topology_of(native) == "encoder-decoder" else {}


FAMILY = Family(
    "mbart",
    config=[
        *bart_config(pre_norm=True),
        Field("vocab_size"),
        *LEARNED,
        *EMBEDDING_NORM,
        *LOGITS_BIAS,
        *HEADS,
        Derived((), _decoder_start, lambda config: {}),
    ],
    weights=[*SHARED_EMBEDDING, *BART_WEIGHTS, *HEAD_WEIGHTS],
    drops=[*FORMAT_NUMBERS, *UNREAD_CROSS_ATTENTION],
    spellings=BART_SPELLINGS,
    architectures=named("MBart", *BART_CLASSES),
    # Before transformers 4.0 one class served the whole line.
    also={"BartForConditionalGeneration": SEQ2SEQ_LM},
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
