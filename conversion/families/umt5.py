"""umT5: mT5 with a position bias for each layer. arXiv 2304.09151."""

from ..relation import Const
from ..rules import Family
from .stacks import SEQ2SEQ_LM
from .t5 import SCALED_HEAD, SCALED_HEAD_ALIASES
from .text_to_text import (
    T5_COPIES,
    T5_DROPS,
    T5_INERT,
    T5_VARIANTS,
    T5_WEIGHTS,
    bias_per_layer,
    feed_forward_kind,
    t5_config,
)

FAMILY = Family(
    "umt5",
    config=[*t5_config(), feed_forward_kind(), SCALED_HEAD, Const("relative_attention_shared", False)],
    weights=[*T5_WEIGHTS, *bias_per_layer()],
    drops=T5_DROPS,
    architectures={SEQ2SEQ_LM: "UMT5ForConditionalGeneration"},
    variants=T5_VARIANTS,
    copies=T5_COPIES,
    aliases=SCALED_HEAD_ALIASES,
    # The last: read by no release.
    inert=(*T5_INERT, "scalable_attention"),
)
