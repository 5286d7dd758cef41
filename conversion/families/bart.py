"""BART: learned positions from row 2 on, a norm after the embedding and after each branch. arXiv 1910.13461."""

from ..relation import Field
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
    "bart",
    config=[*bart_config(pre_norm=False), Field("vocab_size"), *LEARNED, *EMBEDDING_NORM, *LOGITS_BIAS],
    weights=[*SHARED_EMBEDDING, *BART_WEIGHTS],
    drops=FORMAT_NUMBERS,
    spellings=BART_SPELLINGS,
    architectures={SEQ2SEQ_LM: "BartForConditionalGeneration"},
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
