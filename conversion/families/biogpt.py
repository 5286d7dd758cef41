"""BioGPT: learned positions from row 2 on, scaled embeddings, trained on PubMed. arXiv 2210.10341."""

from ..entries import Const, Field
from ..ops import both
from ..rules import Family
from .common import CAUSAL_LM, EQUAL_HEADS
from .decoders import HEADS
from .encoders import MODEL, SEQUENCE, TOKEN, named, of_task
from .xglm import FAIRSEQ, fairseq_block

FAMILY = Family(
    "biogpt",
    config=[
        *EQUAL_HEADS,
        Field("hidden_act"),
        Field("hidden_dropout_prob", "hidden_dropout", "embedding_dropout"),
        Field("attention_probs_dropout_prob", "attention_dropout"),
        *FAIRSEQ,
        # Whatever layer_norm_eps says.
        Const("norm_eps", 1e-5),
        Const("position_encoding", "learned"),
        *HEADS,
    ],
    weights=[
        *both("biogpt.embed_tokens", "model.embed_tokens"),
        *both("biogpt.embed_positions", "model.embed_positions"),
        *fairseq_block("biogpt.layers.{i}"),
        *both("biogpt.layer_norm", "model.norm"),
        *both("output_projection", "lm_head"),
        *of_task("SequenceClassification", both("score")),
        *of_task("TokenClassification", both("classifier", "score")),
    ],
    spellings=({}, {"biogpt.": ""}),
    architectures=named("BioGpt", CAUSAL_LM, MODEL, SEQUENCE, TOKEN),
    inert=("layerdrop", "layer_norm_eps"),
)
