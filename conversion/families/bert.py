"""BERT: an encoder with learned positions, token types and norms after each branch. arXiv 1810.04805.

The same: ERNIE 1.0 to 3.0 (arXiv 1904.09223); with norms before each branch: Megatron-BERT (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..entries import Entry, Field
from ..ops import both
from ..rules import Drop, Family, Rule
from .common import CAUSAL_LM
from .encoders import (
    BERT_BLOCK,
    GAMMA_BETA,
    INERT,
    LEARNED,
    MASKED_LM,
    MODEL,
    NORMS_AFTER,
    READ_POOLER,
    bert_weights,
    bias_spellings,
    classes,
    classifier_dropout,
    constants,
    head_with_own_bias,
    kept,
    norms_before,
    norms_where,
    spellings,
    topology,
    variants,
)
from .experts import always, as_theirs

HEAD = "cls.predictions"
BIAS = (f"{HEAD}.decoder", f"{HEAD}.bias")


def family(
    name: str,
    theirs: str,
    model: str,
    causal: str,
    *,
    norms: Sequence[Entry] = NORMS_AFTER,
    dropout: str | None = "classifier_dropout",
    config: Sequence[Entry] = (),
    weights: Sequence[Rule] = (),
) -> Family:
    """BERT, or one of those that differ from it in little.

    Args:
        theirs: what their classes' names begin with.
        model: what the names of a base model's tensors begin with.
        causal: the name of their causal class.
        dropout: its field for the dropout before a classifier; None: as in the blocks.
        norms, config, weights: where its norms are, and what it has beside BERT.
    """
    return Family(
        name,
        config=[
            *BERT_BLOCK,
            *norms,
            Field("max_position_embeddings"),
            *LEARNED,
            topology(causal),
            classifier_dropout(dropout),
            *config,
        ],
        weights=[
            *bert_weights(model),
            *weights,
            *head_with_own_bias(f"{HEAD}.transform.dense", f"{HEAD}.transform.LayerNorm", *BIAS),
            *both("classifier", "score"),
            *both("qa_outputs"),
        ],
        drops=[
            *constants(f"{model}.embeddings"),
            *kept("cls.seq_relationship"),
            Drop(BIAS[1], "not read where the head is not tied", keep=True),
        ],
        spellings=spellings({f"{model}.": ""}, GAMMA_BETA, *bias_spellings(*BIAS)),
        architectures={**classes(theirs), CAUSAL_LM: causal},
        # Both have a head for the next sentence, which is dropped.
        also={f"{theirs}ForPreTraining": MASKED_LM, f"{theirs}ForNextSentencePrediction": MODEL},
        variants=variants(READ_POOLER, READ_POOLER[:1]),
        copies={BIAS[1]: (f"{HEAD}.decoder.bias",)},
        inert=INERT,
    )


MEGATRON = "bert.encoder.layer.{i}"

FAMILY = family("bert", "Bert", "bert", "BertLMHeadModel")
FAMILIES = (
    FAMILY,
    family(
        "ernie",
        "Ernie",
        "ernie",
        "ErnieForCausalLM",
        # A further embedding, of tasks; of how many, where there is none.
        config=[always("use_task_id", False), as_theirs(("task_type_vocab_size",), lambda config: {})],
    ),
    family(
        "megatron-bert",
        "MegatronBert",
        "bert",
        "MegatronBertForCausalLM",
        norms=norms_before(embedding_norm=False),
        dropout=None,
        weights=norms_where(f"{MEGATRON}.attention.ln", f"{MEGATRON}.ln", "bert.encoder.ln"),
    ),
)
