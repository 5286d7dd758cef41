"""jina-embeddings-v3, without its adapters: XLM-RoBERTa with rotary positions, fused projections. arXiv 2409.10173."""

from ..entries import Entry, Field
from ..ops import both, qkv_rows
from ..rules import Family, Rule
from .common import LAYER, QKV, ROPE
from .encoders import BERT_BLOCK, ENCODER, INERT, NORMS_AFTER, POOLER, bias_spellings, classes, spellings, variants
from .roberta import BIAS, HEAD_WEIGHTS, ROBERTA_HEADS, UNREAD_BIAS


def rotating_weights(model: str, attention: str) -> list[Rule]:
    """Embeddings, attention, norms and pooler of a base model that is called `model`; its feed-forward is not here."""
    block = f"{model}.encoder.layers.{{i}}"
    return [
        *both(f"{model}.embeddings.word_embeddings", "model.embed_tokens"),
        *both(f"{model}.embeddings.token_type_embeddings", "model.embed_types"),
        *both(f"{model}.emb_ln", "model.embed_norm"),
        *both(f"{block}.{attention}.Wqkv", QKV, qkv_rows),
        *both(f"{block}.{attention}.out_proj", f"{LAYER}.self_attn.o_proj"),
        *both(f"{block}.norm1", f"{LAYER}.attn_norm.out"),
        *both(f"{block}.mlp.fc2", f"{LAYER}.mlp.down_proj"),
        *both(f"{block}.norm2", f"{LAYER}.mlp_norm.out"),
        *both(f"{model}.pooler.dense", "model.pooler.dense"),
    ]


# Positions as in LLaMA; the length is that of the training, and of no table.
ROTATING: list[Entry] = [*NORMS_AFTER, *ROPE, Field("max_position_embeddings"), *ENCODER]

FAMILY = Family(
    "jina_embeddings_v3",
    config=[*BERT_BLOCK, *ROTATING, *ROBERTA_HEADS],
    weights=[
        *rotating_weights("roberta", "mixer"),
        *both("roberta.encoder.layers.{i}.mlp.fc1", f"{LAYER}.mlp.up_proj"),
        *HEAD_WEIGHTS,
    ],
    drops=[UNREAD_BIAS],
    spellings=spellings({"roberta.": ""}, *bias_spellings(*BIAS)),
    architectures=classes("JinaEmbeddingsV3"),
    variants=variants(POOLER, POOLER[::-1]),
    copies={BIAS[1]: (f"{BIAS[0]}.bias",)},
    inert=INERT,
)
