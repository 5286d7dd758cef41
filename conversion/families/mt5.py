"""mT5: T5 1.1 over a hundred languages; its class never scales the output. arXiv 2010.11934."""

from ..entries import Const, Derived
from ..rules import Family
from .encoders import named
from .text_to_text import (
    OUTPUT_IN_FP32,
    T5_ALSO,
    T5_CLASSES,
    T5_COPIES,
    T5_DROPS,
    T5_INERT,
    T5_SPELLINGS,
    T5_VARIANTS,
    T5_WEIGHTS,
    feed_forward_kind,
    in_every_class,
    shared_bias,
    t5_config,
)

FAMILY = Family(
    "mt5",
    config=[
        *t5_config(),
        *OUTPUT_IN_FP32,
        feed_forward_kind(),
        # Whatever config.json says, transformers' class ties the head unless there is one on disk.
        Const("tie_word_embeddings", False),
        Derived(
            ("tie_word_embeddings",),
            to_ours=lambda native: {},
            to_theirs=lambda config: {"tie_word_embeddings": config.tie_word_embeddings},
        ),
    ],
    weights=in_every_class([*T5_WEIGHTS, *shared_bias()]),
    drops=T5_DROPS,
    architectures=named("MT5", *T5_CLASSES),
    also=T5_ALSO,
    encoder="MT5EncoderModel",
    spellings=T5_SPELLINGS,
    variants=T5_VARIANTS,
    copies=T5_COPIES,
    inert=T5_INERT,
)
