"""DistilBERT: BERT without token types and pooler. arXiv 1910.01108."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..ops import both
from ..rules import Family
from .common import LAYER, TOKENS
from .encoders import (
    ENCODER,
    GAMMA_BETA,
    HEADS,
    LEARNED,
    POST_NORM,
    classes,
    classifier_dense,
    constants,
    embeddings,
    head,
    spellings,
    task,
)

BLOCK = "distilbert.transformer.layer.{i}"
# Their dropout before each task's last layer. A bare model's is that of the sequence classifier it may become.
DROPOUTS = {"QuestionAnswering": "qa_dropout", "TokenClassification": "dropout"}


def _dropout(config: Any) -> str:
    return DROPOUTS.get(task(config), "seq_classif_dropout")


def _dropout_to_theirs(config: Any) -> Values:
    name = _dropout(config)
    return {} if name == "dropout" else {name: config.classifier_dropout}


FAMILY = Family(
    "distilbert",
    config=[
        *TOKENS,
        Field("dim", "hidden_size"),
        Field("n_layers", "num_hidden_layers"),
        Field("n_heads", "num_attention_heads"),
        Field("hidden_dim", "intermediate_size"),
        Field("max_position_embeddings"),
        Field("activation", "hidden_act"),
        # Theirs leaves attention's output as it is; ours drops out both branches' in training.
        Field("dropout", "hidden_dropout", "embedding_dropout"),
        Field("attention_dropout"),
        Derived(
            ("seq_classif_dropout", "qa_dropout"),
            lambda native: {"classifier_dropout": getattr(native, _dropout(native))},
            _dropout_to_theirs,
        ),
        *POST_NORM,
        *LEARNED,
        *HEADS,
        *ENCODER,
        Const("norm_eps", 1e-12),
        Const("classifier_pooling", "first"),
        Const("classifier_dense", True),
        Const("classifier_act", "relu"),
    ],
    weights=[
        *embeddings("distilbert.embeddings"),
        *[
            rule
            for ours, theirs in {"q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin"}.items()
            for rule in both(f"{BLOCK}.attention.{theirs}", f"{LAYER}.self_attn.{ours}_proj")
        ],
        *both(f"{BLOCK}.sa_layer_norm", f"{LAYER}.attn_norm.out"),
        *both(f"{BLOCK}.ffn.lin1", f"{LAYER}.mlp.up_proj"),
        *both(f"{BLOCK}.ffn.lin2", f"{LAYER}.mlp.down_proj"),
        *both(f"{BLOCK}.output_layer_norm", f"{LAYER}.mlp_norm.out"),
        *head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        *classifier_dense("pre_classifier"),
        *both("classifier", "score"),
        *both("qa_outputs"),
    ],
    drops=constants("distilbert.embeddings"),
    spellings=spellings({"distilbert.": ""}, GAMMA_BETA),
    architectures=classes("DistilBert"),
    # How a fresh table of positions begins; it is on disk.
    inert=("sinusoidal_pos_embds",),
)
