"""mBART: BART with norms before each branch, and a last one after each stack. arXiv 2001.08210, 2008.00401."""

from ..relation import Const, Field
from ..rules import Family
from .stacks import (
    BART_INERT,
    BART_SPELLINGS,
    BART_VARIANTS,
    BART_WEIGHTS,
    EMBEDDING_NORM,
    FORMAT_NUMBERS,
    LEARNED,
    LOGITS_BIAS,
    SEQ2SEQ_LM,
    SHARED_COPIES,
    SHARED_EMBEDDING,
    bart_config,
)

FAMILY = Family(
    "mbart",
    config=[
        *bart_config(pre_norm=True),
        Field("vocab_size"),
        *LEARNED,
        *EMBEDDING_NORM,
        *LOGITS_BIAS,
        Const("wrap_decoder_start", True),
    ],
    weights=[*SHARED_EMBEDDING, *BART_WEIGHTS],
    drops=FORMAT_NUMBERS,
    spellings=BART_SPELLINGS,
    architectures={SEQ2SEQ_LM: "MBartForConditionalGeneration"},
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
