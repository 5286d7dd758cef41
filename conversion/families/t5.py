"""T5 1.0, 1.1 and FLAN-T5: a position bias on the scores, no scale on them. arXiv 1910.10683."""

from typing import Any

from ..entries import Derived, Values
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


def head(native: Any) -> Values:
    """T5 1.0 ties the head and divides what it reads by sqrt(width); 1.1 does neither, and says so by denying the tie.

    transformers' class scales by what config.json says and ties by what is on disk.
    """
    scaled = getattr(native, "scale_decoder_outputs", None) is not False
    return {"tie_word_embeddings": scaled, "logit_scale": native.d_model**-0.5 if scaled else 1.0}


def head_to_theirs(config: Any) -> Values:
    return dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs"), config.logit_scale != 1.0)


SCALED_HEAD = Derived(("tie_word_embeddings", "scale_decoder_outputs"), head, head_to_theirs)
# Said twice, because transformers' classes forget the first as they read it, umT5's of some releases without a trace.
SCALED_HEAD_ALIASES = {"tie_word_embeddings": "scale_decoder_outputs"}

FAMILY = Family(
    "t5",
    config=[*t5_config(), *OUTPUT_IN_FP32, feed_forward_kind(), SCALED_HEAD],
    weights=in_every_class([*T5_WEIGHTS, *shared_bias()]),
    drops=T5_DROPS,
    architectures=named("T5", *T5_CLASSES),
    also=T5_ALSO,
    encoder="T5EncoderModel",
    spellings=T5_SPELLINGS,
    variants=T5_VARIANTS,
    copies=T5_COPIES,
    aliases=SCALED_HEAD_ALIASES,
    inert=T5_INERT,
)
