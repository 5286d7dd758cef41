"""nomic-embed-text 1 and 1.5: BERT with rotary positions, SwiGLU and few biases. arXiv 2402.01613."""

from ..entries import Const
from ..ops import both
from ..rules import Drop, Family
from .common import HEAD_DIM, LAYER
from .encoders import (
    BERT_FIELDS,
    INERT,
    MASKED_LM,
    MODEL,
    READ_POOLER,
    SEQUENCE,
    TOKEN,
    bias_spellings,
    classifier_dropout,
    head_with_own_bias,
    named,
    spellings,
    variants,
)
from .jina_embeddings_v3 import ROTATING, rotating_weights

HEAD = "cls.predictions"
BIAS = (f"{HEAD}.decoder", f"{HEAD}.bias")
BLOCK = "nomic_bert.encoder.layers.{i}"

FAMILY = Family(
    "nomic_bert",
    config=[
        *BERT_FIELDS,
        *ROTATING,
        *HEAD_DIM,
        classifier_dropout(),
        Const("norm_type", "layernorm"),
    ],
    weights=[
        *rotating_weights("nomic_bert", "attn"),
        *both(f"{BLOCK}.mlp.fc11", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.mlp.fc12", f"{LAYER}.mlp.gate_proj"),
        *head_with_own_bias(f"{HEAD}.transform.dense", f"{HEAD}.transform.layer_norm", *BIAS),
        *both("classifier", "score"),
    ],
    drops=[Drop(BIAS[1], "not read where the head is not tied", keep=True)],
    spellings=spellings({"nomic_bert.": ""}, *bias_spellings(*BIAS)),
    architectures=named("NomicBert", MASKED_LM, MODEL, SEQUENCE, TOKEN),
    variants={**variants(READ_POOLER, READ_POOLER[:1]), MODEL: READ_POOLER[::-1]},
    copies={BIAS[1]: (f"{HEAD}.decoder.bias",)},
    inert=INERT,
)
