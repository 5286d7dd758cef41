"""Architectures by name: the models of the line as fresh configs, to start from, to compare or to ablate.

The figures are data, in `presets.toml` beside this file. Most presets are a published config.json, read as `convert`
reads it, so a preset is what a converted checkpoint would be.
"""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_left
from functools import cache
from typing import Any

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .preset_table import names, row, table
from .steps import LANGUAGE_MODELS, Pass, model_steps

__all__ = ["get", "names", "row", "scaled", "table"]

# What the layers of a model have one by one.
BY_LAYER = ("layer_types", "mlp_layer_types")


def get(name: str, **switches: Any) -> LlmArchConfig:
    """A fresh config of a preset, with `switches` changed.

    Fields that follow from a changed one are derived anew. Fewer layers are the first of the preset's own, with their
    pattern of windows and experts.

    Raises:
        ValueError: for a name that is not there; for more layers than a pattern has, unless it is given as well.
        huggingface_hub.errors.StrictDataclassError: for a combination that cannot be.
    """
    return changed(fresh(name), switches)


def fresh(name: str) -> LlmArchConfig:
    """The config of a preset, unchanged."""
    found = row(name)
    fields = copy.deepcopy(found["config"])
    if found["family"] is None:
        config = LlmArchConfig(**fields)
        config.architectures = [LANGUAGE_MODELS[config.topology]]
        return config
    from hf_llmarch.conversion.families import family_of
    from hf_llmarch.conversion.relation import read_config

    family = family_of({"model_type": found["family"]})
    architecture = next(iter(family.architectures))
    variant = family.variants.get(architecture, ({},))[0]
    return read_config(family, fields, architecture, variant)


def changed(config: LlmArchConfig, switches: dict[str, Any]) -> LlmArchConfig:
    """The config with some switches changed."""
    if not switches:
        return config
    layers = switches.get("num_hidden_layers", config.num_hidden_layers)
    if layers != config.num_hidden_layers:
        switches = {**by_layer(config, layers), **switches}
    return LlmArchConfig.from_dict(config.to_dict(), **switches)


def by_layer(config: LlmArchConfig, layers: int) -> dict[str, Any]:
    """What the first so many layers of a config have one by one.

    Raises:
        ValueError: for more layers than there are, where they are not all alike.
    """
    values: dict[str, Any] = {}
    for name in BY_LAYER:
        kinds = getattr(config, name)
        if kinds is None:
            continue
        if layers > len(kinds) and len(set(kinds)) > 1:
            raise ValueError(
                f"num_hidden_layers={layers}: the preset's {name} are a pattern of {len(kinds)} layers. "
                f"Give {name} too."
            )
        values[name] = kinds[:layers] if layers <= len(kinds) else [kinds[0]] * layers
    if config.nope_layers:
        values["nope_layers"] = [i for i in config.nope_layers if i < layers] or None
    for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
        if getattr(config, name) is not None and kind not in values["layer_types"]:
            values[name] = None
    return values


# -- a style at another size -------------------------------------------------------------------------------------------

SIZES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def number(size: float | str) -> int:
    """A number as it is, or as written: `150M`, `1.5B`.

    Raises:
        ValueError: for what is neither.
    """
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBT]?)", size.strip().upper().replace(",", "").replace("E", "e"))
    if match is None:
        raise ValueError(f"{size!r} is no number: write it like 150M or 1.5B.")
    return round(float(match[1]) * SIZES.get(match[2], 1))


def scaled(name: str, parameters: float | str, **switches: Any) -> LlmArchConfig:
    """A preset's style at another size: its proportions of depth, width, heads and feed-forward, its width of a head
    where that leaves enough heads, and all its switches. The vocabulary stays, unless `switches` say otherwise.

    Args:
        parameters: how many there are to be, as a number or like `150M`; the result is the nearest that whole heads and
            layers allow, within 10 %.

    Raises:
        ValueError: where the preset cannot be brought to that size, for example because its vocabulary alone is larger.
    """
    config, target = get(name, **switches), number(parameters)
    ratio = target / count(config)
    # Depth goes with the cube root of the parameters, and width a little faster, as in the families that come in sizes.
    wanted = config.hidden_size / config.num_hidden_layers * ratio ** (1 / 6)
    group = 1 if config.num_key_value_heads == 1 else config.num_attention_heads // config.num_key_value_heads
    least = 2 if config.attention_kind == "gqa" else 1
    fewest, most = depths(config, ratio)

    @cache
    def sized(layers: int, groups: int, head: int) -> tuple[LlmArchConfig, float]:
        """So many layers and groups of heads, and how far from the target that is, as a logarithm."""
        candidate = changed(config, shape(config, layers, groups, group, head))
        return candidate, math.log(count(candidate) / target)

    @cache
    def of_width(groups: int, head: int) -> LlmArchConfig:
        """The nearest to the target with so many groups of heads: a layer more or less is the finest step there is."""
        depth = bisect_left(range(most), 0.0, lo=fewest, key=lambda layers: sized(layers, groups, head)[1])
        found = (sized(layers, groups, head) for layers in {depth, max(fewest, depth - 1)})
        return min(found, key=lambda candidate: abs(candidate[1]))[0]

    def aspect(candidate: LlmArchConfig) -> float:
        return candidate.hidden_size / candidate.num_hidden_layers

    def near(head: int) -> list[LlmArchConfig]:
        """Those about the first width that is large enough for its depth: wider is shallower."""
        widest = 2 + 2 * round(config.num_attention_heads * config.head_dim / head / group * max(1, ratio))
        groups = bisect_left(range(widest), wanted, lo=least, key=lambda n: aspect(of_width(n, head)))
        return [of_width(n, head) for n in range(max(least, groups - 1), groups + 2)]

    def error(candidate: LlmArchConfig) -> float:
        """Proportions twice as far, or heads of an eighth of the width, are as bad as seven percent of the size."""
        off = abs(math.log(aspect(candidate) / wanted)) + math.log(config.head_dim / candidate.head_dim) / 3
        return abs(math.log(count(candidate) / target)) + 0.1 * off

    best = min((candidate for head in head_widths(config) for candidate in near(head)), key=error)
    if abs(count(best) / target - 1) > 0.1:
        raise ValueError(
            f"No shape in the style of {name!r} has {target:,} parameters within 10 %; the nearest has "
            f"{count(best):,}. Its vocabulary of {config.vocab_size:,} or its experts may be too many for it: give "
            "vocab_size, num_experts or another size."
        )
    return best


def count(config: LlmArchConfig) -> int:
    """Parameters."""
    source = 1 if config.topology == "encoder-decoder" else 0
    return sum(step.parameters for step in model_steps(config, Pass(1, 1, source=source)))


def depths(config: LlmArchConfig, ratio: float) -> tuple[int, int]:
    """The fewest and the most layers to try: enough for an expert layer, and no more than a pattern has."""
    kinds = config.mlp_layer_types or []
    fewest = min(config.num_hidden_layers, max(2, kinds.index("sparse") + 1 if "sparse" in kinds else 0))
    most = max(fewest, round(3 * config.num_hidden_layers * max(ratio, ratio ** (1 / 3))))
    if any(len(set(getattr(config, name) or ())) > 1 for name in BY_LAYER):
        most = min(most, config.num_hidden_layers)
    return fewest, most


def head_widths(config: LlmArchConfig) -> list[int]:
    """The preset's own, and halves of it down to 32."""
    if config.attention_kind == "mla":
        return [config.head_dim]
    return [
        config.head_dim >> n for n in range(3) if n == 0 or (config.head_dim >> n >= 32 and config.head_dim % 2**n == 0)
    ]


def shape(config: LlmArchConfig, layers: int, groups: int, group: int, head: int) -> dict[str, Any]:
    """The switches of a size: so many layers, and groups of `group` query heads of width `head`."""
    heads = groups * group
    per_head = config.hidden_size / config.num_attention_heads * head / config.head_dim
    width = max(8, 8 * round(heads * per_head / 8))
    share = width / config.hidden_size
    values: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": 1 if config.num_key_value_heads == 1 else groups,
        "head_dim": head,
        "intermediate_size": multiple(config.intermediate_size * share),
    }
    if config.attention_kind == "mla":
        values["kv_lora_rank"] = multiple(config.kv_lora_rank * share)
        values["q_lora_rank"] = None if config.q_lora_rank is None else multiple(config.q_lora_rank * share)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if getattr(config, name) is not None:
            values[name] = multiple(getattr(config, name) * share)
    if config.embedding_scale != 1.0:
        # sqrt(hidden_size) in every preset that has one.
        values["embedding_scale"] = width**0.5
    if config.attention_scale is not None and math.isclose(config.attention_scale, config.head_dim**-0.5):
        values["attention_scale"] = head**-0.5
    return values


def multiple(size: float, of: int = 16) -> int:
    """The nearest multiple, at least one."""
    return max(of, of * round(size / of))
