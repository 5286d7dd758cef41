"""Switch Transformers: T5 with one expert a token in some layers, and no more tokens an expert than it has room for.

arXiv 2101.03961.
"""

from typing import Any

from ..entries import Const, Derived, Field, Values
from ..ops import both, rename, stack
from ..rules import Family, Rule
from .encoders import MODEL, named
from .experts import always
from .stacks import HEADS, SEQ2SEQ_LM, Stack, each_stack, source_of, topology_of
from .text_to_text import (
    BOTH_STACKS_OR_ONE,
    T5_COPIES,
    T5_DROPS,
    T5_INERT,
    T5_SPELLINGS,
    T5_WEIGHTS,
    shared_bias,
    t5_config,
)


def sparse_layers(layers: int, step: int) -> list[str]:
    """Every `step`-th layer is sparse, from the second on; all where the step is 1."""
    return ["sparse" if step == 1 or (step > 0 and i % step == 1) else "dense" for i in range(layers)]


def step_of(layers: int, sparse: int) -> int:
    return layers // sparse if sparse else layers


def _layers(native: Any) -> Values:
    decoder = sparse_layers(native.num_decoder_layers, native.decoder_sparse_step)
    encoder = sparse_layers(native.num_layers, native.encoder_sparse_step)
    if topology_of(native) == "encoder":
        return {"num_hidden_layers": len(encoder), "mlp_layer_types": encoder}
    source: Values = {}
    if len(encoder) != len(decoder):
        source["num_hidden_layers"] = len(encoder)
    if encoder != decoder:
        source["mlp_layer_types"] = encoder
    return {"num_hidden_layers": len(decoder), "mlp_layer_types": decoder, "source_stack": source or None}


def _layers_to_theirs(config: Any) -> Values:
    values: Values = {}
    for side, prefix, stacked in (("encoder", "num", source_of(config)), ("decoder", "num_decoder", config)):
        layers, kinds = stacked.num_hidden_layers, stacked.mlp_layer_types
        # The count that makes this pattern; where none does, reading the result again will show it.
        counts = [n for n in range(layers + 1) if sparse_layers(layers, step_of(layers, n)) == kinds] or [layers]
        values |= {
            f"{prefix}_layers": layers,
            f"num_sparse_{side}_layers": counts[0],
            f"{side}_sparse_step": step_of(layers, counts[0]),
        }
    return values


LAYER_FIELDS = (
    *("num_layers", "num_decoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers"),
    *("encoder_sparse_step", "decoder_sparse_step"),
)


def _head(native: Any) -> Values:
    tied = native.tie_word_embeddings
    return {"tie_word_embeddings": tied, "logit_scale": native.d_model**-0.5 if tied else 1.0}


def _feed_forward(place: Stack) -> list[Rule]:
    side, layer = place.theirs, place.layer
    mlp = f"{side}.block.{layer[-3:]}.layer.{1 if side == 'encoder' else 2}.mlp"
    return [
        *both(f"{mlp}.router.classifier", f"{layer}.mlp.gate"),
        *[
            rule
            for theirs, ours in (("wi", "up_proj"), ("wo", "down_proj"))
            for rule in (
                Rule((f"{mlp}.{theirs}.weight",), (f"{layer}.mlp.{ours}.weight",), rename),
                Rule((f"{mlp}.experts.expert_{{e}}.{theirs}.weight",), (f"{layer}.mlp.experts.{ours}",), stack),
                Rule(
                    (f"{mlp}.experts.expert_{{e}}.{theirs}.weight",),
                    (f"{layer}.mlp.experts.{{e}}.{ours}.weight",),
                    rename,
                ),
            )
        ],
    ]


FAMILY = Family(
    "switch_transformers",
    config=[
        *[entry for entry in t5_config() if "num_layers" not in entry.theirs and entry not in HEADS],
        Derived(LAYER_FIELDS, _layers, _layers_to_theirs),
        Derived(("tie_word_embeddings",), _head, lambda config: {"tie_word_embeddings": config.tie_word_embeddings}),
        Field("dense_act_fn", "hidden_act"),
        Const("ffn_type", "mlp"),
        Field("num_experts"),
        Field("expert_capacity"),
        Field("router_bias"),
        Field("router_jitter_noise"),
        Field("router_z_loss_coef"),
        Field("router_aux_loss_coef"),
        Const("num_experts_per_tok", 1),
        Const("norm_topk_prob", False),
        always("router_dtype", "float32"),
        always("router_type", "tokens_masked"),
        always("num_selected_experts", 1),
        always("is_gated_act", False),
        always("feed_forward_proj", "relu"),
    ],
    weights=[
        *[rule for rule in T5_WEIGHTS if "DenseReluDense" not in rule.theirs[0]],
        *each_stack(_feed_forward),
        *shared_bias(),
    ],
    drops=T5_DROPS,
    architectures=named("SwitchTransformers", SEQ2SEQ_LM, MODEL),
    encoder="SwitchTransformersEncoderModel",
    spellings=T5_SPELLINGS,
    variants=BOTH_STACKS_OR_ONE,
    copies=T5_COPIES,
    # Its routers keep the last, and do not use it.
    inert=(*T5_INERT, "router_ignore_padding_tokens"),
)
