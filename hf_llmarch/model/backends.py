"""What attention implementations honour, and what a config asks of them.

A new attention implementation is one row of `HONOURS`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .block import ATTENTIONS
from .configuration_llmarch import SWITCHES, LlmArchConfig
from .declarations import Feature, facts
from .norms import NORMS
from .positions import POSITIONS
from .routing import ROUTERS

# What no attention implementation has to do itself: the modules around it do it, or a mask that all of them accept.
AROUND = frozenset(
    {
        *(Feature.WINDOWS, Feature.BOTH_SIDES, Feature.TWO_STACKS, Feature.TWO_WIDTHS, Feature.WHOLE_ROWS),
        *(Feature.ALL_HEADS, Feature.BEFORE_LAYERS, Feature.AFTER_LAYERS),
        *(Feature.HEAD_TRANSFORM, Feature.SCALE_BEFORE_CAP),
    }
)
# Transformers' paged cache holds several texts in one row, and keys and values of one width.
_PAGED = AROUND - {Feature.TWO_STACKS, Feature.TWO_WIDTHS, Feature.WHOLE_ROWS}
# vLLM and SGLang hold several texts in one row, run decoders alone, have heads of their own, and bound logits before
# they scale them.
_SERVED = AROUND - {Feature.TWO_STACKS, Feature.WHOLE_ROWS, Feature.HEAD_TRANSFORM, Feature.SCALE_BEFORE_CAP}

# What each implementation honours. It would silently ignore anything else, except that sdpa raises on a soft-cap.
HONOURS: dict[str, frozenset[Feature]] = {
    "eager": frozenset(Feature),
    "sdpa": AROUND | {Feature.SCORE_BIAS, Feature.CHUNKS},
    "flex_attention": AROUND | {Feature.SOFT_CAP, Feature.CHUNKS},
    "flash_attention_2": AROUND | {Feature.SOFT_CAP},
    "flash_attention_3": AROUND | {Feature.SOFT_CAP, Feature.SINKS},
    "flash_attention_4": AROUND | {Feature.SOFT_CAP, Feature.SINKS},
    "paged|flash_attention_2": _PAGED | {Feature.SOFT_CAP},
    "paged|flash_attention_3": _PAGED | {Feature.SOFT_CAP, Feature.SINKS},
    "vllm": _SERVED | {Feature.SOFT_CAP, Feature.SINKS},
}
# What implementations without a row honour, by the beginning of their names. All that is known of the others, for
# example kernels of the Hub, is that they compute softmax(q.k) v under a mask.
_OTHERS: dict[str, frozenset[Feature]] = {"paged|": _PAGED, "vllm": _SERVED, "sglang": _SERVED, "": AROUND}


def _honoured(implementation: str) -> frozenset[Feature]:
    """The features that an attention implementation honours."""
    row = HONOURS.get(implementation)
    return row if row is not None else next(_OTHERS[name] for name in _OTHERS if implementation.startswith(name))


@dataclass(frozen=True)
class Demand:
    """A feature that a config asks for, with the field, its value, and the reason in words."""

    field: str
    value: Any
    feature: Feature
    reason: str


def demands(config: LlmArchConfig) -> tuple[Demand, ...]:
    """What the switches and the parts of any layer ask for, each field and feature once."""
    found: dict[tuple[str, Feature], Demand] = {}
    for layer in config.layer_configs():
        for demand in (*_switch_demands(layer), *_part_demands(layer)):
            found.setdefault((demand.field, demand.feature), demand)
    return tuple(found.values())


_ASKING = {name: declared for name, declared in SWITCHES.items() if declared.asks is not None}


def _switch_demands(layer: LlmArchConfig) -> Iterator[Demand]:
    for name, declared in _ASKING.items():
        value = getattr(layer, name)
        feature = declared.asked(layer, value)
        if feature is not None:
            yield Demand(name, value, feature, f"It needs {feature.value}.")


def _part_demands(layer: LlmArchConfig) -> Iterator[Demand]:
    for name, part in parts(layer).items():
        for feature in facts(part).asks:
            yield Demand(name, getattr(layer, name), feature, f"{part.__name__} needs {feature.value}.")


def parts(layer: LlmArchConfig) -> dict[str, type]:
    """The classes that a layer's config chooses for the parts that declare facts, by field."""
    chosen: dict[str, type] = {
        "attention_type": ATTENTIONS[layer.attention_kind],
        "position_encoding": POSITIONS[layer.position_encoding],
        "norm_type": NORMS[layer.norm_type],
    }
    if layer.qk_norm != "none":
        chosen["qk_norm_type"] = NORMS[layer.qk_norm_type or layer.norm_type]
    if layer.num_experts is not None:
        chosen["router_type"] = ROUTERS[layer.router_type]
    return chosen


def honours(implementation: str | None, features: Iterable[Feature]) -> bool:
    """Whether an attention implementation, if one is chosen yet, honours all of these features."""
    return implementation is None or _honoured(implementation).issuperset(features)


def known(implementation: str) -> bool:
    """Whether there is or may be an attention implementation of that name: a kernel of the Hub is yet to be loaded."""
    listed = implementation in HONOURS or implementation in ALL_ATTENTION_FUNCTIONS
    return listed or "/" in implementation or any(map(implementation.startswith, filter(None, _OTHERS)))


def refuse_backend(config: LlmArchConfig, implementation: str | None) -> None:
    """
    Raises:
        ValueError: naming the first switch that `implementation` would ignore, and the implementations that would not.
            A name that nobody knows is left to transformers, which lists those that it has.
    """
    if implementation is not None and not known(implementation):
        return
    for demand in demands(config):
        if not honours(implementation, (demand.feature,)):
            able = sorted(name for name in HONOURS if "|" not in name and demand.feature in HONOURS[name])
            raise ValueError(
                f"attn_implementation={implementation!r} cannot do {demand.field}={demand.value!r} and would ignore "
                f"it. Use one of: {', '.join(able)}. {demand.reason}"
            )
