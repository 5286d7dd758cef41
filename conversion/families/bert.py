"""BERT: an encoder with learned positions, token types and norms after each branch. arXiv 1810.04805."""

from ..entries import Field
from ..ops import both
from ..rules import Drop, Family
from .common import CAUSAL_LM
from .encoders import (
    BERT_SIZES,
    GAMMA_BETA,
    LEARNED,
    MASKED_LM,
    MODEL,
    READ_POOLER,
    bert_weights,
    bias_spellings,
    classes,
    classifier_dropout,
    constants,
    head_with_own_bias,
    kept,
    spellings,
    topology,
    variants,
)

HEAD = "cls.predictions"
BIAS = (f"{HEAD}.decoder", f"{HEAD}.bias")

FAMILY = Family(
    "bert",
    config=[
        *BERT_SIZES,
        Field("max_position_embeddings"),
        *LEARNED,
        topology("BertLMHeadModel"),
        classifier_dropout(),
    ],
    weights=[
        *bert_weights("bert"),
        *head_with_own_bias(f"{HEAD}.transform.dense", f"{HEAD}.transform.LayerNorm", *BIAS),
        *both("classifier", "score"),
        *both("qa_outputs"),
    ],
    drops=[
        *constants("bert.embeddings"),
        *kept("cls.seq_relationship"),
        Drop(BIAS[1], "not read where the head is not tied", keep=True),
    ],
    spellings=spellings({"bert.": ""}, GAMMA_BETA, *bias_spellings(*BIAS)),
    architectures={**classes("Bert"), CAUSAL_LM: "BertLMHeadModel"},
    # Both have a head for the next sentence, which is dropped.
    also={"BertForPreTraining": MASKED_LM, "BertForNextSentencePrediction": MODEL},
    variants=variants(READ_POOLER, READ_POOLER[:1]),
    copies={BIAS[1]: (f"{HEAD}.decoder.bias",)},
)
