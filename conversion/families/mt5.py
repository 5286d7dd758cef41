"""mT5: T5 1.1 over a hundred languages; its class never scales the output. arXiv 2010.11934."""

from ..relation import Const, Derived
from ..rules import Family
from .stacks import SEQ2SEQ_LM
from .text_to_text import (
    T5_COPIES,
    T5_DROPS,
    T5_INERT,
    T5_VARIANTS,
    T5_WEIGHTS,
    feed_forward_kind,
    shared_bias,
    t5_config,
)

FAMILY = Family(
    "mt5",
    config=[
        *t5_config(),
        feed_forward_kind(),
        # Whatever config.json says, transformers' class ties the head unless there is one on disk.
        Const("tie_word_embeddings", False),
        Derived(
            ("tie_word_embeddings",),
            to_ours=lambda native: {},
            to_theirs=lambda config: {"tie_word_embeddings": config.tie_word_embeddings},
        ),
    ],
    weights=[*T5_WEIGHTS, *shared_bias()],
    drops=T5_DROPS,
    architectures={SEQ2SEQ_LM: "MT5ForConditionalGeneration"},
    variants=T5_VARIANTS,
    copies=T5_COPIES,
    inert=T5_INERT,
)
