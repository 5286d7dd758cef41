"""BART: learned positions from row 2 on, a norm after the embedding and after each branch. arXiv 1910.13461."""

from ..entries import Field
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
    SHARED_COPIES,
    SHARED_EMBEDDING,
    UNREAD_CROSS_ATTENTION,
    bart_config,
)

FAMILY = Family(
    "bart",
    config=[*bart_config(pre_norm=False), Field("vocab_size"), *LEARNED, *EMBEDDING_NORM, *LOGITS_BIAS, *HEADS],
    weights=[*SHARED_EMBEDDING, *BART_WEIGHTS, *HEAD_WEIGHTS],
    drops=[*FORMAT_NUMBERS, *UNREAD_CROSS_ATTENTION],
    spellings=BART_SPELLINGS,
    architectures=named("Bart", *BART_CLASSES),
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
