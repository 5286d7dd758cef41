"""How the modules of a model are split over devices: plans in transformers' names for styles of parallelism.

A plan is made from the config. transformers refuses a plan that names a module that the model does not have, and a
module that is split in the wrong way gives wrong numbers. What depends on the number of devices is decided when a model
is spread over them.
"""

import re
from collections import Counter
from math import gcd
from typing import Any

import torch
from torch import nn

from .attention import Attention, CrossAttention, ScoredAttention
from .backends import AROUND, demands
from .block import ATTENTIONS
from .compat import EP_DISPATCHES
from .configuration_llmarch import LlmArchConfig
from .declarations import SHARED, Feature, facts

_COLUMNS_THEN_ROWS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}

# What each form of parallelism honours. None of them splits a part that declares no facts.
_DECLARED = frozenset(Feature) - {Feature.UNDECLARED}
# Tensor parallel: what attention may ask for and still be split by heads. Attention that asks for more stays whole.
_BY_HEADS = (AROUND - {Feature.ALL_HEADS}) | {Feature.SOFT_CAP, Feature.CHUNKS}
# Pipeline: transformers sends hidden states to the next stage as if they were embeddings, and keeps `embed_tokens`,
# `layers`, `norm` and `lm_head` alone apart. Whatever else stands before the first layer or after the last one would
# act once in each stage.
PIPELINE = (AROUND - {Feature.BOTH_SIDES, Feature.TWO_STACKS, Feature.BEFORE_LAYERS, Feature.AFTER_LAYERS}) | {
    *(Feature.SOFT_CAP, Feature.SINKS, Feature.SCORE_BIAS, Feature.CHUNKS),
}
# Context parallel: each device has a part of the text, and gets neither a mask nor a bias for its scores.
_CONTEXT = AROUND - {Feature.WINDOWS, Feature.BOTH_SIDES, Feature.TWO_STACKS, Feature.WHOLE_ROWS}
# The options of transformers' `DistributedConfig` that are refused where their form does not honour a demand.
_FORMS: dict[str, tuple[str, frozenset[Feature]]] = {
    "tp_size": ("tensor parallelism", _DECLARED),
    "ep_size": ("expert parallelism", _DECLARED),
    "pp_size": ("pipeline", PIPELINE),
}


# -- tensor parallel -------------------------------------------------------------------------------------------------


def tensor_parallel_plan(config: LlmArchConfig) -> dict[str, str]:
    """Attention by heads, as its class declares, and feed-forwards by inner width.

    Some parts stay whole, so that every device computes them: attention with parameters that span the heads (sinks,
    norms over the projection or with a weight per head, biases of scores), and packed experts with biases.
    """
    layers = config.layer_configs()
    asked = demands(config)
    kinds = {ATTENTIONS[layer.attention_kind] for layer in layers}
    plan: dict[str, str] = {}
    # A plan says the same for all layers, so their attentions must be of one class.
    if len(kinds) == 1 and _BY_HEADS.issuperset(demand.feature for demand in asked):
        plan |= _within("layers.*.self_attn", facts(kinds.pop()).tensor_plan(config, layers))
    # Only self-attention uses the position encoding, so its demands do not concern cross-attention.
    asked = tuple(demand for demand in asked if demand.field != "position_encoding")
    if config.topology == "encoder-decoder" and _BY_HEADS.issuperset(demand.feature for demand in asked):
        plan |= _within("layers.*.cross_attn", facts(CrossAttention).tensor_plan(config, layers))
    return plan | _feed_forward_plan(config)


def _within(module: str, plan: dict[str, str]) -> dict[str, str]:
    """A plan of submodules as one of the whole model."""
    return {f"{module}.{name}": style for name, style in plan.items()}


def _feed_forward_plan(config: LlmArchConfig) -> dict[str, str]:
    plan: dict[str, str] = {}
    sparse = []
    for i, kind in enumerate(config.mlp_layer_types or ["dense"] * config.num_hidden_layers):
        layer = config.layer(i)
        if kind == "dense":
            plan |= _split_feed_forward("layers.*.mlp", layer)
        else:
            sparse.append(layer)
            plan |= _split_feed_forward("layers.*.mlp.shared_experts", layer) if layer.shared_width else {}
    # A plan says the same for all layers, so their experts must be alike.
    layouts = {layer.experts_layout for layer in sparse}
    if layouts == {"linear"}:
        for layer in sparse:
            plan |= _split_feed_forward("layers.*.mlp.experts.*", layer)
    if layouts == {"packed"} and not any(layer.ffn_bias for layer in sparse):
        # The bias of `down_proj` would be added once on each device.
        for layer in sparse:
            plan |= _packed_plan(layer)
    return plan


def _split_feed_forward(module: str, layer: LlmArchConfig) -> dict[str, str]:
    names = [name for name in _COLUMNS_THEN_ROWS if layer.ffn_type == "glu" or name != "gate_proj"]
    plan = {f"{module}.{name}": _COLUMNS_THEN_ROWS[name] for name in names}
    return plan | ({f"{module}.act_fn": SHARED} if layer.swish_beta == "learned" else {})


def _packed_plan(layer: LlmArchConfig) -> dict[str, str]:
    up = {"gate_up_proj": "packed_colwise"} if layer.ffn_type == "glu" else {"up_proj": "colwise"}
    plan = {f"layers.*.mlp.experts.{name}": style for name, style in {**up, "down_proj": "rowwise"}.items()}
    if layer.swish_beta == "learned":
        plan["layers.*.mlp.experts.act_fn"] = SHARED
    return {**plan, "layers.*.mlp.experts": "moe_tp_experts"}


# -- expert parallel -------------------------------------------------------------------------------------------------


def expert_parallel_plan(config: LlmArchConfig) -> dict[str, str]:
    """Whole experts on different devices. Only packed experts can be split so, along their first dimension."""
    layers = [config.layer(i) for i, kind in enumerate(config.mlp_layer_types or ()) if kind == "sparse"]
    if not layers or any(layer.experts_layout != "packed" for layer in layers):
        return {}
    names: set[str] = {"down_proj"}
    for layer in layers:
        up = "gate_up_proj" if layer.ffn_type == "glu" else "up_proj"
        names |= {up, f"{up}_bias", "down_proj_bias"} if layer.ffn_bias else {up}
    plan = {f"layers.*.mlp.experts.{name}": "grouped_gemm" for name in sorted(names)}
    if any(layer.swish_beta == "learned" for layer in layers):
        plan["layers.*.mlp.experts.act_fn"] = SHARED
    if EP_DISPATCHES:
        return {**plan, "layers.*.mlp.experts": "ep_dispatch_experts"}
    return {"layers.*.mlp.gate": "ep_router", **plan, "layers.*.mlp.experts": "moe_tp_experts"}


# -- pipeline --------------------------------------------------------------------------------------------------------


def pipeline_plan(config: LlmArchConfig) -> dict[str, tuple[list[str], list[str]]]:
    """The stages' inputs and outputs, as native decoders state them; nothing for what has to stay in one piece."""
    if not PIPELINE.issuperset(demand.feature for demand in demands(config)):
        return {}
    stages = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    }
    return {**stages, "norm": (["hidden_states"], ["hidden_states"])} if config.final_norm else stages


# -- context parallel ------------------------------------------------------------------------------------------------


def supports_context(config: LlmArchConfig) -> bool:
    """Whether a text can be split over devices, each of which then has a part of it, and no mask."""
    return _CONTEXT.issuperset(demand.feature for demand in demands(config))


# -- fitting a model to its devices ----------------------------------------------------------------------------------


def refuse_sizes(config: LlmArchConfig, sizes: Any) -> None:
    """
    Args:
        sizes: transformers' `DistributedConfig`.

    Raises:
        ValueError: for a layout that would give other numbers, naming the switches that it does not go with.
    """
    asked = demands(config)
    for option, (form, honoured) in _FORMS.items():
        size = getattr(sizes, option, None) or 1
        lacking = [demand for demand in asked if demand.feature not in honoured]
        if size > 1 and lacking:
            found = ", ".join(f"{demand.field}={demand.value!r}" for demand in lacking)
            raise ValueError(
                f"{option}={size}: no {form} with {found}. {lacking[0].reason} Use another form of parallelism, for "
                "example fsdp_size."
            )
    for layer in config.layer_configs():
        bound = layer.capacity_factor if layer.expert_capacity is None else layer.expert_capacity
        if getattr(sizes, "enable_expert_parallel", False) and bound is not None and not EP_DISPATCHES:
            raise ValueError(
                "capacity_factor and expert_capacity need transformers 5.19 or newer for expert parallelism: older "
                "releases renumber each process's experts before tokens are counted. Upgrade it, or use tp_size alone."
            )


def keep_whole(model: Any, size: int) -> list[Attention]:
    """Take keys and values out of a model's plan where their heads cannot be split over `size` devices.

    Returns:
        the attentions concerned. Each device computes all their keys and values, and `pick_heads` keeps those it needs.

    Raises:
        ValueError: where the query heads cannot be split either.
    """
    readers: list[tuple[str, Attention]] = []
    places: set[str] = set()
    for name, part in model.named_modules():
        place = re.sub(r"\.\d+(?=\.)", ".*", name)
        if not isinstance(part, ScoredAttention) or model.tp_plan.get(f"{place}.o_proj") != "rowwise":
            continue
        layer = part.config.layer(part.layer_idx)
        if layer.num_attention_heads % size:
            heads = f"num_attention_heads={layer.num_attention_heads}"
            raise ValueError(f"{name}: {heads} cannot be split over tp_size={size} devices.")
        if isinstance(part, Attention):
            readers.append((place, part))
            places |= {place} if layer.num_key_value_heads % size else set()
    for place in places:
        del model.tp_plan[f"{place}.k_proj"], model.tp_plan[f"{place}.v_proj"]
    # A plan says the same for all layers: where one layer's heads do not split, no layer's are.
    return [part for place, part in readers if place in places]


def pick_heads(attention: Attention, mesh: Any) -> None:
    """Make an attention keep only those heads of its keys and values that its query heads on this device read.

    The device computes all keys and values, but only a part of the query heads.
    """
    layer = attention.config.layer(attention.layer_idx)
    heads, groups = layer.num_attention_heads // mesh.size(), attention.num_key_value_groups
    read = [head // groups for head in range(mesh.get_local_rank() * heads, (mesh.get_local_rank() + 1) * heads)]
    # Attention implementations want each key head to serve the same number of query heads, so one may stand twice.
    attention.num_key_value_groups = gcd(*Counter(read).values())
    picks = torch.tensor(read[:: attention.num_key_value_groups])

    def pick(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        by_head = _whole_gradient(out, mesh).unflatten(-1, (-1, attention.head_dim))
        return by_head[..., picks.to(out.device), :].flatten(-2)

    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_hook(pick)


def _whole_gradient(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The same tensor, with a gradient that is summed over the mesh: each device computes only a part of it."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # not in every build of torch

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
