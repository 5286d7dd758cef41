"""RoFormer: BERT with rotary positions on neighbouring channels. arXiv 2104.09864."""

from ..entries import Const, Field
from ..ops import both
from ..rules import Drop, Family
from .encoders import (
    BERT_SIZES,
    ENCODER,
    GAMMA_BETA,
    bert_weights,
    bias_spellings,
    classes,
    classifier_dense,
    classifier_dropout,
    head_with_own_bias,
    kept,
    of_task,
    own_embedding_width,
    spellings,
)
from .experts import always

HEAD = "cls.predictions"
BIAS = (f"{HEAD}.decoder", f"{HEAD}.bias")

FAMILY = Family(
    "roformer",
    config=[
        *BERT_SIZES,
        own_embedding_width(),
        Field("max_position_embeddings"),
        *ENCODER,
        classifier_dropout(None),
        Const("position_encoding", "rope"),
        Const("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
        Const("rope_interleaved", True),
        always("rotary_value", False),
        Const("classifier_pooling", "first"),
        Const("classifier_dense", True),
        Const("classifier_input_dropout", True),
        Field("hidden_act", "hidden_act", "classifier_act"),
    ],
    weights=[
        *bert_weights("roformer"),
        *head_with_own_bias(f"{HEAD}.transform.dense", f"{HEAD}.transform.LayerNorm", *BIAS),
        *classifier_dense("classifier.dense"),
        *of_task("SequenceClassification", both("classifier.out_proj", "score")),
        *of_task("TokenClassification", both("classifier", "score")),
        *both("qa_outputs"),
    ],
    drops=[
        Drop("roformer.encoder.embed_positions.weight", "table of sinusoids, a constant", keep=True),
        *kept("roformer.pooler.dense", what="pooler of the first release, which transformers does not read"),
        Drop(BIAS[1], "not read where the head is not tied", keep=True),
    ],
    spellings=spellings({"roformer.": ""}, GAMMA_BETA, *bias_spellings(*BIAS)),
    architectures=classes("RoFormer"),
    copies={BIAS[1]: (f"{HEAD}.decoder.bias",)},
)
