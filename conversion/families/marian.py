"""Marian's translators: sinusoids, norms after each branch, one vocabulary or one a side. arXiv 1804.00344."""

from typing import Any

from ..entries import Derived, Values
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
    SINUSOIDS,
    UNREAD_CROSS_ATTENTION,
    bart_config,
    embedding_shared,
    sinusoid_tables,
    topology_of,
)


def _sharing(native: Any) -> Values:
    shared = native.share_encoder_decoder_embeddings
    return {"share_source_embeddings": shared} if topology_of(native) == "encoder-decoder" else {}


def _sharing_to_theirs(config: Any) -> Values:
    shared = config.share_source_embeddings
    return {"share_encoder_decoder_embeddings": shared} if config.topology == "encoder-decoder" else {}


FAMILY = Family(
    "marian",
    config=[
        *bart_config(("vocab_size", "vocab_size", "decoder_vocab_size"), pre_norm=False),
        Derived(("share_encoder_decoder_embeddings",), _sharing, _sharing_to_theirs),
        *SINUSOIDS,
        *NO_EMBEDDING_NORM,
        *LOGITS_BIAS,
    ],
    weights=[
        *embedding_shared(lambda config: config.topology == "encoder-decoder" and config.share_source_embeddings),
        *BART_WEIGHTS,
    ],
    drops=[*sinusoid_tables("weight"), *UNREAD_CROSS_ATTENTION],
    spellings=BART_SPELLINGS,
    architectures={SEQ2SEQ_LM: "MarianMTModel", **named("Marian", MODEL, CAUSAL_LM)},
    # Before transformers 4.0 one class served the whole line.
    also={"BartForConditionalGeneration": SEQ2SEQ_LM},
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
