"""Marian's translators: sinusoids, norms after each branch, one vocabulary or one a side. arXiv 1804.00344."""

from ..ops import only, weight
from ..relation import Field
from ..rules import Family
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
    bart_config,
    sinusoid_tables,
)

FAMILY = Family(
    "marian",
    config=[
        *bart_config(("vocab_size", "vocab_size", "decoder_vocab_size"), pre_norm=False),
        Field("share_encoder_decoder_embeddings", "share_source_embeddings"),
        *SINUSOIDS,
        *NO_EMBEDDING_NORM,
        *LOGITS_BIAS,
    ],
    weights=[
        *only(lambda config: config.share_source_embeddings, SHARED_EMBEDDING),
        *only(
            lambda config: not config.share_source_embeddings,
            weight("model.decoder.embed_tokens", "model.embed_tokens"),
        ),
        *BART_WEIGHTS,
    ],
    drops=sinusoid_tables("weight"),
    spellings=BART_SPELLINGS,
    architectures={SEQ2SEQ_LM: "MarianMTModel"},
    variants=BART_VARIANTS,
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
