"""Which module is cut how across devices, in the host's style names, for the modules that a config's model has.

A plan is made from the config: an entry without a module is an error there, and a module cut wrongly is wrong numbers.
"""

from .compat import EP_DISPATCHES
from .configuration_llmarch import LlmArchConfig

COLUMNS_THEN_ROWS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def tensor_parallel_plan(config: LlmArchConfig) -> dict[str, str]:
    """Attention by heads and feed-forwards by inner width.

    Left whole, hence computed on every device: attention whose parts hold numbers for all heads together (MLA's
    latents, sinks, norms over the projection or by head, and biases of ALiBi and T5).
    """
    plan: dict[str, str] = {}
    layers = config.layer_configs()
    if all(splits_by_heads(layer) for layer in layers):
        plan |= {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
        plan["layers.*.self_attn.o_proj"] = "rowwise"
        if any(layer.qk_norm == "head" for layer in layers):
            # Every device norms its own heads with the same gain, of which each sees a part of the gradient.
            plan |= {f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
    return plan | feed_forward_plan(config)


def splits_by_heads(layer: LlmArchConfig) -> bool:
    return (
        layer.attention_kind != "mla"
        and layer.qk_norm in ("none", "head")
        and not layer.attention_sinks
        and layer.position_encoding not in ("alibi", "relative_bias")
    )


def feed_forward_plan(config: LlmArchConfig) -> dict[str, str]:
    plan: dict[str, str] = {}
    for i, kind in enumerate(config.mlp_layer_types or ["dense"] * config.num_hidden_layers):
        layer = config.layer(i)
        names = [name for name in COLUMNS_THEN_ROWS if layer.ffn_type == "glu" or name != "gate_proj"]
        plan |= sparse_plan(layer, names) if kind == "sparse" else cut("layers.*.mlp", names)
    return plan


def cut(module: str, names: list[str]) -> dict[str, str]:
    return {f"{module}.{name}": COLUMNS_THEN_ROWS[name] for name in names}


def sparse_plan(layer: LlmArchConfig, names: list[str]) -> dict[str, str]:
    plan = cut("layers.*.mlp.shared_experts", names) if layer.shared_width else {}
    if layer.experts_layout == "linear":
        return plan | cut("layers.*.mlp.experts.*", names)
    if layer.ffn_bias:  # the packed bias of `down_proj` would be added once a device
        return plan
    up = {"gate_up_proj": "packed_colwise"} if layer.ffn_type == "glu" else {"up_proj": "colwise"}
    experts = {f"layers.*.mlp.experts.{name}": style for name, style in {**up, "down_proj": "rowwise"}.items()}
    return plan | experts | {"layers.*.mlp.experts": "moe_tp_experts"}


def expert_parallel_plan(config: LlmArchConfig) -> dict[str, str]:
    """Whole experts on different devices: of packed experts only, which are cut along their first dimension."""
    layers = config.layer_configs()
    packed = all(layer.experts_layout == "packed" for layer in layers)
    if "sparse" not in (config.mlp_layer_types or ()) or not packed:
        return {}
    up = "gate_up_proj" if layers[0].ffn_type == "glu" else "up_proj"
    names = [up, "down_proj", *([f"{up}_bias", "down_proj_bias"] if layers[0].ffn_bias else [])]
    plan = {f"layers.*.mlp.experts.{name}": "grouped_gemm" for name in names}
    if EP_DISPATCHES:
        return {**plan, "layers.*.mlp.experts": "ep_dispatch_experts"}
    return {"layers.*.mlp.gate": "ep_router", **plan, "layers.*.mlp.experts": "moe_tp_experts"}
