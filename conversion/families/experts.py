"""What families with experts share: where experts are on disk, which layers are sparse, how wide they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..entries import Const, Derived, Entry, Field, Values
from ..errors import UnsupportedField
from ..ops import chain, flip, join_experts, rename, stack, weight
from ..rules import Op, Rule
from .common import LAYER

# Ours, packed into one tensor a layer or one by one as plain Linears: `experts_layout`.
PACKED = f"{LAYER}.mlp.experts"
ONE = f"{PACKED}.{{e}}"


def experts(theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> list[Rule]:
    """Experts that are on disk one by one, under `theirs` with `{e}` for their number, as three matrices."""
    gate_up, down = (f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"), f"{theirs}.{down}.weight"
    return [
        Rule(gate_up, (f"{PACKED}.gate_up_proj",), join_experts),
        Rule((down,), (f"{PACKED}.down_proj",), stack),
        Rule(gate_up[:1], (f"{ONE}.gate_proj.weight",), rename),
        Rule(gate_up[1:], (f"{ONE}.up_proj.weight",), rename),
        Rule((down,), (f"{ONE}.down_proj.weight",), rename),
    ]


def packed_experts(gate_up: str, down: str, gate_up_op: Op, down_op: Op, suffixes: tuple[str, str]) -> list[Rule]:
    """Experts that are on disk in two tensors a layer, which the operations bring into our shape.

    Args:
        suffixes: of our packed tensors' names and of our Linears': ("", ".weight") or ("_bias", ".bias").
    """
    packed, one = suffixes
    return [
        Rule((gate_up,), (f"{PACKED}.gate_up_proj{packed}",), gate_up_op),
        Rule((down,), (f"{PACKED}.down_proj{packed}",), down_op),
        Rule((gate_up,), (f"{ONE}.gate_proj{one}", f"{ONE}.up_proj{one}"), chain(gate_up_op, flip(join_experts))),
        Rule((down,), (f"{ONE}.down_proj{one}",), chain(down_op, flip(stack))),
    ]


def router(theirs: str) -> list[Rule]:
    return weight(theirs, f"{LAYER}.mlp.gate")


# As most call them.
ROUTED: list[Rule] = [*router(f"{LAYER}.mlp.gate"), *experts(f"{LAYER}.mlp.experts.{{e}}")]


def shared_experts(theirs: str) -> list[Rule]:
    """The rules for the feed-forward that every token passes."""
    return [
        rule
        for part in ("gate", "up", "down")
        for rule in weight(f"{theirs}.{part}_proj", f"{LAYER}.mlp.shared_experts.{part}_proj")
    ]


def always(name: str, *values: Any) -> Derived:
    """A field of theirs that has to have one of these values, or be absent; no field of ours says it."""

    def to_ours(native: Any) -> Values:
        if (value := getattr(native, name, values[0])) not in values:
            raise UnsupportedField(
                f"{name}={value!r} is not known here: it has to be {' or '.join(map(repr, values))}. Converting would "
                "change the model's numbers."
            )
        return {}

    return Derived((name,), to_ours, lambda config: {})


def expert_width(config: Any) -> int:
    return config.moe_intermediate_size or config.intermediate_size


def as_theirs(names: tuple[str, ...], to_theirs: Callable[[Any], Values]) -> Derived:
    """Fields that another entry, or none, reads, and that are written by this one."""
    return Derived(names, lambda native: {}, to_theirs)


def as_ours(to_ours: Callable[[Any], Values]) -> Derived:
    """Fields of ours that another entry writes back."""
    return Derived((), to_ours, lambda config: {})


# Of the three numbers that make a router, the number of experts is spelt in many ways.
def routing(experts: str = "num_experts") -> list[Entry]:
    return [Field(experts, "num_experts"), Field("num_experts_per_tok")]


# The auxiliary loss of Mixtral and all that followed: over the batch and all layers together.
AUXILIARY_LOSS: list[Entry] = [Field("router_aux_loss_coef"), Const("router_aux_loss_scope", "model")]
# They add that loss only when asked for router logits; we do whenever its factor is not 0, and compute no less.
LOSS_OUTPUT = ("output_router_logits",)
# Router logits in the model's own dtype, as in all classes but DeepSeek's.
ROUTER_IN_MODEL_DTYPE: list[Entry] = [Const("router_in_fp32", False)]
# Their classes say `_keep_in_fp32_modules_strict = ["gate.weight"]`.
ROUTER_STAYS_IN_FP32: list[Entry] = [Const("keep_in_fp32", ["router"])]
# `intermediate_size` is the width of an expert; there is no dense layer.
ONLY_EXPERTS: list[Entry] = [as_theirs((), lambda config: {"intermediate_size": expert_width(config)})]


def if_sparse(layers: Callable[[Any], Values], entries: Sequence[Entry]) -> list[Entry]:
    """Entries about experts. A model whose layers are all dense has none, whatever its config.json says of them.

    Args:
        layers: `mlp_layer_types` of a config of theirs.
    """

    def entry(entry: Entry) -> Derived:
        return Derived(
            entry.theirs,
            lambda native: entry.to_ours(native) if "sparse" in layers(native)["mlp_layer_types"] else {},
            lambda config: entry.to_theirs(config) if config.num_experts else {},
        )

    return [entry(one) for one in entries]


def layer_kinds(config: Any) -> list[str]:
    """Of each layer of ours, whether its feed-forward is dense or sparse."""
    return config.mlp_layer_types or ["sparse" if config.num_experts else "dense"] * config.num_hidden_layers


def _sparse_layers(native: Any) -> Values:
    sparse = [
        i not in native.mlp_only_layers and (i + 1) % native.decoder_sparse_step == 0
        for i in range(native.num_hidden_layers)
    ]
    return {"mlp_layer_types": ["sparse" if is_sparse else "dense" for is_sparse in sparse]}


# Qwen's: a width of their own for experts, and a list of dense layers besides every n-th that is sparse.
QWEN_EXPERTS: list[Entry] = [
    *if_sparse(
        _sparse_layers,
        [
            *routing(),
            Field("norm_topk_prob"),
            Derived(
                ("moe_intermediate_size",),
                lambda native: {"moe_intermediate_size": native.moe_intermediate_size},
                lambda config: {"moe_intermediate_size": expert_width(config)},
            ),
            as_ours(_sparse_layers),
            *AUXILIARY_LOSS,
            *ROUTER_IN_MODEL_DTYPE,
        ],
    ),
    as_theirs(
        ("decoder_sparse_step", "mlp_only_layers"),
        lambda config: {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, kind in enumerate(layer_kinds(config)) if kind == "dense"],
        },
    ),
]


def qwen_experts_and(*entries: Entry) -> list[Entry]:
    """Theirs, and what one family has besides."""
    return [*QWEN_EXPERTS, *if_sparse(_sparse_layers, entries)]


# The width of what every token passes.
SHARED_WIDTH: list[Entry] = [
    Derived(
        ("shared_expert_intermediate_size",),
        lambda native: {"shared_expert_intermediate_size": native.shared_expert_intermediate_size},
        lambda config: {"shared_expert_intermediate_size": config.shared_width},
    )
]


def _listed_layers(native: Any) -> Values:
    return {"mlp_layer_types": native.mlp_layer_types}


def experts_where_listed(*entries: Entry) -> list[Entry]:
    """Entries about experts of a family with a list of its own, one a layer."""
    return [
        *if_sparse(_listed_layers, [as_ours(_listed_layers), *entries]),
        as_theirs(("mlp_layer_types",), lambda config: {"mlp_layer_types": layer_kinds(config)}),
    ]


def selection_bias(theirs: str) -> list[Rule]:
    """The bias that experts are picked by, and not weighed by."""
    return [Rule((theirs,), (f"{LAYER}.mlp.gate.e_score_correction_bias",), rename)]
