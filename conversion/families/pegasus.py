"""PEGASUS: sinusoids, norms before each branch. arXiv 1912.08777."""

from ..entries import Field
from ..rules import Family
from .common import CAUSAL_LM
from .encoders import MODEL, named
from .stacks import (
    BART_INERT,
    BART_SPELLINGS,
    BART_VARIANTS,
    BART_WEIGHTS,
    LOGITS_BIAS,
    NO_EMBEDDING_NORM,
    SEQ2SEQ_LM,
    SHARED_COPIES,
    SHARED_EMBEDDING,
    SINUSOIDS,
    UNREAD_CROSS_ATTENTION,
    bart_config,
    sinusoid_tables,
)

FAMILY = Family(
    "pegasus",
    config=[*bart_config(pre_norm=True), Field("vocab_size"), *SINUSOIDS, *NO_EMBEDDING_NORM, *LOGITS_BIAS],
    weights=[*SHARED_EMBEDDING, *BART_WEIGHTS],
    drops=[*sinusoid_tables("weight"), *UNREAD_CROSS_ATTENTION],
    spellings=BART_SPELLINGS,
    architectures=named("Pegasus", SEQ2SEQ_LM, MODEL, CAUSAL_LM),
    # Before transformers 4.0 one class served the whole line.
    also={"BartForConditionalGeneration": SEQ2SEQ_LM},
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
