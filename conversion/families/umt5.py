"""umT5: mT5 with a position bias for each layer. arXiv 2304.09151."""

from ..entries import Const
from ..rules import Family
from .encoders import named
from .t5 import SCALED_HEAD, SCALED_HEAD_ALIASES
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
    bias_per_layer,
    feed_forward_kind,
    in_every_class,
    t5_config,
)

FAMILY = Family(
    "umt5",
    config=[*t5_config(), *OUTPUT_IN_FP32, feed_forward_kind(), SCALED_HEAD, Const("relative_attention_shared", False)],
    weights=in_every_class([*T5_WEIGHTS, *bias_per_layer()]),
    drops=T5_DROPS,
    architectures=named("UMT5", *T5_CLASSES),
    also=T5_ALSO,
    encoder="UMT5EncoderModel",
    spellings=T5_SPELLINGS,
    variants=T5_VARIANTS,
    copies=T5_COPIES,
    aliases=SCALED_HEAD_ALIASES,
    inert=T5_INERT,
)
