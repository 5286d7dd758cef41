"""ModernBERT: rotary positions, local and global attention by turns, GeGLU, norms before branches. arXiv 2412.13663."""

from __future__ import annotations

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..ops import both, halves, qkv_rows
from ..rules import Family
from .common import ATTENTION_BIAS, LAYER, QKV, TOKENS
from .encoders import classes, classifier_dense, head, of_task
from .experts import always

BLOCK = "model.layers.{i}"
# The dense layer and the norm stand before every task's last layer; and what that is called here.
TASKS = {"SequenceClassification": "score", "TokenClassification": "score", "QuestionAnswering": "qa_outputs"}
POOLINGS = {"cls": "first", "mean": "mean"}
_THEIR_POOLINGS = {ours: theirs for theirs, ours in POOLINGS.items()}
# The bases have a name each in the first releases.
BASES = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}


def _windows(native: Any) -> Values:
    sliding = "sliding_attention" in native.layer_types
    return {
        "layer_types": native.layer_types,
        # Theirs is the width of the window, ours what is seen of it on either side.
        "sliding_window": native.local_attention // 2 if sliding else None,
        "rope_parameters": {kind: native.rope_parameters[kind] for kind in dict.fromkeys(native.layer_types)},
    }


def _windows_to_theirs(config: Any) -> Values:
    values: Values = {"layer_types": config.layer_types}
    if config.sliding_window is not None:
        values["local_attention"] = 2 * config.sliding_window
    by_type = config.rope_by_layer_type
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    values["rope_parameters"] = {kind: by_type.get(kind, plain) for kind in BASES}
    return values | {name: values["rope_parameters"][kind].get("rope_theta") for kind, name in BASES.items()}


FAMILY = Family(
    "modernbert",
    config=[
        *TOKENS,
        Field("hidden_size"),
        Field("num_hidden_layers"),
        Field("num_attention_heads"),
        Field("intermediate_size"),
        Field("max_position_embeddings"),
        Field("hidden_activation", "hidden_act"),
        Field("norm_eps"),
        Field("norm_bias"),
        *ATTENTION_BIAS,
        Field("mlp_bias", "ffn_bias"),
        Field("embedding_dropout"),
        # Both drop out in places that ours does not have; they are 0 in what is published.
        always("attention_dropout", 0.0),
        always("mlp_dropout", 0.0),
        Derived(
            ("local_attention", "layer_types", "rope_parameters", "global_attn_every_n_layers", *BASES.values()),
            _windows,
            _windows_to_theirs,
        ),
        Const("topology", "encoder"),
        Const("norm_type", "layernorm"),
        Const("embedding_norm", True),
        Const("first_attention_norm", False),
        Field("decoder_bias", "lm_head_bias"),
        Field("classifier_activation", "classifier_act", "head_act"),
        Field("classifier_bias", "head_bias"),
        Field("classifier_dropout"),
        Derived(
            ("classifier_pooling",),
            lambda native: {"classifier_pooling": POOLINGS[native.classifier_pooling]},
            lambda config: {"classifier_pooling": _THEIR_POOLINGS.get(config.classifier_pooling)},
        ),
        *[
            Const(name, True)
            for name in (
                "lm_head_transform",
                "classifier_dense",
                "token_head_dense",
                "classifier_norm",
                "classifier_bias",
            )
        ],
    ],
    weights=[
        *both("model.embeddings.tok_embeddings", "model.embed_tokens"),
        *both("model.embeddings.norm", "model.embed_norm"),
        *both(f"{BLOCK}.attn_norm", f"{LAYER}.attn_norm.pre"),
        *both(f"{BLOCK}.attn.Wqkv", QKV, qkv_rows),
        *both(f"{BLOCK}.attn.Wo", f"{LAYER}.self_attn.o_proj"),
        *both(f"{BLOCK}.mlp_norm", f"{LAYER}.mlp_norm.pre"),
        *both(f"{BLOCK}.mlp.Wi", (f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"), halves),
        *both(f"{BLOCK}.mlp.Wo", f"{LAYER}.mlp.down_proj"),
        *both("model.final_norm", "model.norm"),
        *head("head.dense", "head.norm", "decoder"),
        *[rule for name in TASKS for rule in of_task(name, [*classifier_dense("head.dense"), *both("head.norm")])],
        *[rule for name, last in TASKS.items() for rule in of_task(name, both("classifier", last))],
    ],
    spellings=({}, {"model.": ""}),
    architectures=classes("ModernBert"),
    inert=(
        # Of fresh weights, of kernels, and of memory spent in training.
        *("initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile"),
        *("sparse_prediction", "sparse_pred_ignore_index"),
        "sep_token_id",  # the tokenizer's
    ),
)
