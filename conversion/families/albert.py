"""ALBERT: BERT whose layers share their weights, with a narrow embedding. arXiv 1909.11942."""

from __future__ import annotations

from typing import Any

from ..entries import Derived, Field, Values
from ..errors import UnsupportedField
from ..ops import both
from ..rules import Drop, Family
from .common import LAYER
from .encoders import (
    BERT_SIZES,
    ENCODER,
    GAMMA_BETA,
    LEARNED,
    MASKED_LM,
    READ_POOLER,
    bias_spellings,
    classes,
    classifier_dropout,
    constants,
    embeddings,
    head_with_own_bias,
    kept,
    spellings,
    variants,
)
from .experts import always

BIAS = ("predictions.decoder", "predictions.bias")
BLOCK = "albert.encoder.albert_layer_groups.{i}.albert_layers.0"


def _groups(native: Any) -> Values:
    if native.num_hidden_layers % native.num_hidden_groups:
        raise UnsupportedField(
            f"num_hidden_groups={native.num_hidden_groups} does not divide num_hidden_layers="
            f"{native.num_hidden_layers}: here every block runs equally often."
        )
    return {"layer_groups": native.num_hidden_groups}


FAMILY = Family(
    "albert",
    config=[
        *BERT_SIZES,
        # There is a projection even between equal widths.
        Field("embedding_size"),
        Field("max_position_embeddings"),
        *LEARNED,
        *ENCODER,
        classifier_dropout("classifier_dropout_prob"),
        Derived(
            ("num_hidden_groups",),
            _groups,
            lambda config: {"num_hidden_groups": config.layer_groups or config.num_hidden_layers},
        ),
        # Several blocks a group are run in turn each time the group is; ours run one block a group.
        always("inner_group_num", 1),
    ],
    weights=[
        *embeddings("albert.embeddings"),
        *both("albert.encoder.embedding_hidden_mapping_in", "model.embed_projection"),
        *[
            rule
            for ours, theirs in {"q": "query", "k": "key", "v": "value", "o": "dense"}.items()
            for rule in both(f"{BLOCK}.attention.{theirs}", f"{LAYER}.self_attn.{ours}_proj")
        ],
        *both(f"{BLOCK}.attention.LayerNorm", f"{LAYER}.attn_norm.out"),
        *both(f"{BLOCK}.ffn", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.ffn_output", f"{LAYER}.mlp.down_proj"),
        *both(f"{BLOCK}.full_layer_layer_norm", f"{LAYER}.mlp_norm.out"),
        *both("albert.pooler", "model.pooler.dense"),
        *head_with_own_bias("predictions.dense", "predictions.LayerNorm", *BIAS),
        *both("classifier", "score"),
        *both("qa_outputs"),
    ],
    drops=[
        *constants("albert.embeddings"),
        *kept("sop_classifier.classifier"),
        Drop(BIAS[1], "not read where the head is not tied", keep=True),
    ],
    spellings=spellings({"albert.": ""}, GAMMA_BETA, *bias_spellings(*BIAS)),
    architectures=classes("Albert"),
    # Its head for the order of sentences is dropped.
    also={"AlbertForPreTraining": MASKED_LM},
    variants=variants(READ_POOLER, READ_POOLER[:1]),
    copies={BIAS[1]: (f"{BIAS[0]}.bias",)},
)
