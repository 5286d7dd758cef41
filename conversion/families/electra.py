"""ELECTRA, both its discriminator and its generator: BERT with an embedding of its own width. arXiv 2003.10555."""

from ..entries import Const, Field
from ..ops import both
from ..rules import Family
from .encoders import (
    BERT_SIZES,
    ENCODER,
    GAMMA_BETA,
    LEARNED,
    MODEL,
    bert_weights,
    classes,
    classifier_dense,
    classifier_dropout,
    constants,
    head,
    kept,
    of_task,
    own_embedding_width,
    spellings,
)

FAMILY = Family(
    "electra",
    config=[
        *BERT_SIZES,
        own_embedding_width(),
        Field("max_position_embeddings"),
        *LEARNED,
        *ENCODER,
        classifier_dropout(),
        Const("head_act", "gelu"),
        Const("classifier_pooling", "first"),
        Const("classifier_dense", True),
        Const("classifier_input_dropout", True),
        Const("classifier_act", "gelu"),
    ],
    weights=[
        *bert_weights("electra"),
        *head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head"),
        *classifier_dense("classifier.dense"),
        *of_task("SequenceClassification", both("classifier.out_proj", "score")),
        *of_task("TokenClassification", both("classifier", "score")),
        *both("qa_outputs"),
    ],
    drops=[
        *constants("electra.embeddings"),
        *kept("discriminator_predictions.dense", "discriminator_predictions.dense_prediction"),
    ],
    spellings=spellings({"electra.": ""}, GAMMA_BETA),
    architectures=classes("Electra"),
    # The discriminator: its head, which tells replaced tokens from real ones, is dropped.
    also={"ElectraForPreTraining": MODEL},
    # Of the head for multiple choice.
    inert=("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
)
