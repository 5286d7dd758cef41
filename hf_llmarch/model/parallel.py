"""Which module is cut how across devices, in the host's style names, for the modules that a config's model has.

A plan is made from the config: an entry without a module is an error there, and a module cut wrongly is wrong numbers.
What depends on how many devices there are besides is fitted when a model is spread over them.
"""

import re
from collections import Counter
from collections.abc import Callable
from math import gcd
from typing import Any

import torch
from torch import nn

from .attention import Attention, ScoredAttention
from .compat import EP_DISPATCHES
from .configuration_llmarch import LlmArchConfig

COLUMNS_THEN_ROWS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}

# A parameter that every device has whole and uses for its own part alone, of whose gradient it sees a part.
SHARED = "replicated_with_grad_allreduce"


# -- tensor parallel -------------------------------------------------------------------------------------------------


def tensor_parallel_plan(config: LlmArchConfig) -> dict[str, str]:
    """Attention by heads and feed-forwards by inner width.

    Left whole, hence computed on every device: attention whose parts hold numbers for all heads together (sinks, norms
    over the projection or by head, and biases of ALiBi and T5), and packed experts with biases.
    """
    plan: dict[str, str] = {}
    layers = config.layer_configs()
    latent = [layer.attention_kind == "mla" for layer in layers]
    if all(splits_by_heads(layer) and not adds_to_scores(layer) for layer in layers):
        if not any(latent):
            plan |= attention_plan("layers.*.self_attn", layers)
        elif all(latent):
            plan |= latent_plan(config, layers)
    if config.topology == "encoder-decoder" and all(splits_by_heads(layer) for layer in layers):
        plan |= attention_plan("layers.*.cross_attn", layers)
    return plan | feed_forward_plan(config)


def splits_by_heads(layer: LlmArchConfig) -> bool:
    return layer.qk_norm in ("none", "head") and not layer.attention_sinks


def adds_to_scores(layer: LlmArchConfig) -> bool:
    return layer.position_encoding in ("alibi", "relative_bias")


def attention_plan(module: str, layers: list[LlmArchConfig]) -> dict[str, str]:
    plan = {f"{module}.{name}_proj": "colwise" for name in "qkv"} | {f"{module}.o_proj": "rowwise"}
    if any(layer.qk_norm == "head" for layer in layers):
        plan |= {f"{module}.{name}_norm": SHARED for name in "qk"}
    return plan


def latent_plan(config: LlmArchConfig, layers: list[LlmArchConfig]) -> dict[str, str]:
    """Queries and expanded keys and values by heads; every device makes, and caches, the whole latent.

    The host's style for it reads the width of the rotated part from the one config of the whole model.
    """
    rotated = {layer.qk_rope_head_dim for layer in layers}
    if len(rotated) > 1 or "qk_rope_head_dim" in (config.source_stack or {}):
        return {}
    queries = {"q_proj" if layer.q_lora_rank is None else "q_b_proj" for layer in layers}
    cut = {**dict.fromkeys((*queries, "kv_b_proj"), "colwise"), "o_proj": "rowwise"}
    plan = {f"layers.*.self_attn.{name}": style for name, style in cut.items()}
    return {**plan, "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj"}


def feed_forward_plan(config: LlmArchConfig) -> dict[str, str]:
    plan: dict[str, str] = {}
    sparse = []
    for i, kind in enumerate(config.mlp_layer_types or ["dense"] * config.num_hidden_layers):
        layer = config.layer(i)
        if kind == "dense":
            plan |= cut("layers.*.mlp", layer)
        else:
            sparse.append(layer)
            plan |= cut("layers.*.mlp.shared_experts", layer) if layer.shared_width else {}
    # A plan says the same for all layers, so their experts must be alike.
    layouts = {layer.experts_layout for layer in sparse}
    if layouts == {"linear"}:
        for layer in sparse:
            plan |= cut("layers.*.mlp.experts.*", layer)
    if layouts == {"packed"} and not any(layer.ffn_bias for layer in sparse):
        # With a bias, that of `down_proj` would be added once a device.
        for layer in sparse:
            plan |= packed_plan(layer)
    return plan


def cut(module: str, layer: LlmArchConfig) -> dict[str, str]:
    names = [name for name in COLUMNS_THEN_ROWS if layer.ffn_type == "glu" or name != "gate_proj"]
    plan = {f"{module}.{name}": COLUMNS_THEN_ROWS[name] for name in names}
    return plan | ({f"{module}.act_fn": SHARED} if layer.swish_beta == "learned" else {})


def packed_plan(layer: LlmArchConfig) -> dict[str, str]:
    up = {"gate_up_proj": "packed_colwise"} if layer.ffn_type == "glu" else {"up_proj": "colwise"}
    plan = {f"layers.*.mlp.experts.{name}": style for name, style in {**up, "down_proj": "rowwise"}.items()}
    if layer.swish_beta == "learned":
        plan["layers.*.mlp.experts.act_fn"] = SHARED
    return {**plan, "layers.*.mlp.experts": "moe_tp_experts"}


# -- expert parallel -------------------------------------------------------------------------------------------------


def expert_parallel_plan(config: LlmArchConfig) -> dict[str, str]:
    """Whole experts on different devices: of packed experts only, which are cut along their first dimension."""
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

# What keeps a model from being cut between its layers. The host sends hidden states to the next stage as if they were
# embeddings, and keeps `embed_tokens`, `layers`, `norm` and `lm_head` alone apart: what else stands before the first
# layer or after the last one would act once a stage.
ONE_PIECE: dict[str, Callable[[LlmArchConfig], bool]] = {
    "topology": lambda c: c.topology != "decoder",
    "position_encoding": lambda c: c.position_encoding in ("learned", "sinusoidal"),
    "type_vocab_size": lambda c: bool(c.type_vocab_size),
    "embedding_size": lambda c: c.embedding_size is not None,
    "embedding_norm": lambda c: c.embedding_norm,
    "embedding_dropout": lambda c: c.embedding_dropout > 0,
    "final_dropout": lambda c: c.final_dropout > 0,
}


def pipeline_plan(config: LlmArchConfig) -> dict[str, tuple[list[str], list[str]]]:
    """The stages' inputs and outputs, as native decoders state them; nothing for what has to stay in one piece."""
    if any(holds(config) for holds in ONE_PIECE.values()):
        return {}
    stages = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
    }
    return {**stages, "norm": (["hidden_states"], ["hidden_states"])} if config.final_norm else stages


# -- context parallel ------------------------------------------------------------------------------------------------

# Of `attention.DEMANDS`, what is wrong where each device sees a part of a text alone, and no mask.
WHOLE_TEXTS = {
    *("attn_logit_softcapping", "attention_sinks", "position_encoding", "rope_parameters"),
    *("capacity_factor", "expert_capacity", "router_type"),
}


# -- fitting a model to its devices ----------------------------------------------------------------------------------


def refuse_sizes(config: LlmArchConfig, sizes: Any) -> None:
    """
    Args:
        sizes: the host's `DistributedConfig`.

    Raises:
        ValueError: for a layout that would give other numbers, naming the switches that it does not go with.
    """
    if (getattr(sizes, "pp_size", None) or 1) > 1 and not pipeline_plan(config):
        found = ", ".join(f"{name}={getattr(config, name)!r}" for name, holds in ONE_PIECE.items() if holds(config))
        raise ValueError(f"pp_size={sizes.pp_size}: no pipeline with {found}. Use tp_size or fsdp_size instead.")
    for layer in config.layer_configs():
        bound = layer.capacity_factor if layer.expert_capacity is None else layer.expert_capacity
        if getattr(sizes, "enable_expert_parallel", False) and bound is not None and not EP_DISPATCHES:
            raise ValueError(
                "Before transformers 5.19, expert parallelism numbers each process's experts from 0 before their room "
                "is counted: capacity_factor and expert_capacity need a newer one, or tp_size alone."
            )


def keep_whole(model: Any, size: int) -> list[Attention]:
    """Take keys and values out of a model's plan where their heads cannot be split over `size` devices.

    Returns:
        the attentions of these: each device makes all their keys and values, and picks its own by `pick_heads`.

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
    """Let an attention of which this device has a part of the query heads keep, of all keys and values, the heads that
    these read."""
    layer = attention.config.layer(attention.layer_idx)
    heads, groups = layer.num_attention_heads // mesh.size(), attention.num_key_value_groups
    read = [head // groups for head in range(mesh.get_local_rank() * heads, (mesh.get_local_rank() + 1) * heads)]
    # Query heads share keys evenly, as attention implementations want it: a key head is there twice if need be.
    attention.num_key_value_groups = gcd(*Counter(read).values())
    picks = torch.tensor(read[:: attention.num_key_value_groups])

    def pick(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        by_head = whole_gradient(out, mesh).unflatten(-1, (-1, attention.head_dim))
        return by_head[..., picks.to(out.device), :].flatten(-2)

    for projection in (attention.k_proj, attention.v_proj):
        projection.register_forward_hook(pick)


def whole_gradient(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    """The same numbers on every device of the mesh; of what comes back, of which each has a part, the sum."""
    from torch.distributed.tensor import DTensor, Partial, Replicate  # not in every build of torch

    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def local_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight of a projection, or of one that is sharded by rows this device's shard.

    None for any other weight, such as a quantised one, and for a shard while gradients are computed: its gradient would
    lack what the other devices contribute.
    """
    if type(weight) is nn.Parameter:
        return weight
    placements: Any = getattr(weight, "placements", None)
    by_rows = placements is not None and all(placement.is_shard(0) for placement in placements)
    return None if torch.is_grad_enabled() or not by_rows else weight.to_local()  # type: ignore[attr-defined]
