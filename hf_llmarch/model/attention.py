"""Attention with whole keys and values: MHA, GQA, MQA, and every switch on their scores.

Shapes: `B` batch, `T` query, `S` key, `H` query heads, `G` key/value heads, `D` head width.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_llmarch import LlmArchConfig, QKNorm
from .embeddings import Clamp, Map, chain, unchanged
from .linear import Linear
from .norms import norm
from .positions import POSITIONS, attention_scale, no_rotation

# The implementations of the host and of vLLM. Others (kernels of the Hub, say) are known to add nothing to a score.
KNOWN = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4", "vllm")


class AllBut:
    """A set of implementations: all but those whose names begin with one of these."""

    def __init__(self, *prefixes: str):
        self.prefixes = prefixes

    def __contains__(self, implementation: str) -> bool:
        return not implementation.startswith(self.prefixes)


# Several texts in one row, without a mask: what looks at a row's length or at its other tokens sees other texts' too.
UNPACKED = AllBut("vllm", "sglang", "paged|")

# What attention asks for beyond q.k, and the implementations that do it. Every other one would drop it without a word,
# except that sdpa raises on a soft-cap. vLLM and SGLang also have heads of their own, and run decoders alone.
HONOURS: dict[str, frozenset[str] | AllBut] = {
    "attn_logit_softcapping": frozenset({*KNOWN, "paged|flash_attention_2", "paged|flash_attention_3"}) - {"sdpa"},
    "attention_sinks": frozenset(
        {"eager", "flash_attention_3", "flash_attention_4", "paged|flash_attention_3", "vllm"}
    ),
    "position_encoding": frozenset({"eager", "sdpa"}),
    "attention_chunk_size": frozenset({"eager", "sdpa", "flex_attention"}),
    "attention_type": AllBut("paged|"),
    "rope_parameters": UNPACKED,
    "capacity_factor": UNPACKED,
    "expert_capacity": UNPACKED,
    "router_type": UNPACKED,
    "topology": UNPACKED,
    "lm_head_transform": AllBut("vllm", "sglang"),
    "logit_scale": AllBut("vllm", "sglang"),
}

DEMANDS: dict[str, Callable[[LlmArchConfig], bool]] = {
    "attn_logit_softcapping": lambda c: c.attn_logit_softcapping is not None,
    "attention_sinks": lambda c: c.attention_sinks,
    "position_encoding": lambda c: c.position_encoding in ("alibi", "relative_bias"),
    "attention_chunk_size": lambda c: "chunked_attention" in c.layer_types,
    # The host's paged cache has keys and values of one width.
    "attention_type": lambda c: c.attention_kind == "mla",
    # Frequencies that follow the longest text, whose cached keys were turned by earlier ones.
    "rope_parameters": lambda c: any(p["rope_type"] in ("dynamic", "longrope") for p in c.rope_by_layer_type.values()),
    "capacity_factor": lambda c: c.capacity_factor is not None,
    "expert_capacity": lambda c: c.expert_capacity is not None,
    "router_type": lambda c: c.num_experts is not None and c.router_type == "expert_choice",
    "topology": lambda c: c.topology == "encoder-decoder",
    "lm_head_transform": lambda c: c.lm_head_transform,
    # vLLM bounds logits before it scales them.
    "logit_scale": lambda c: c.logit_scale != 1.0 and c.final_logit_softcapping is not None,
}


def demands(config: LlmArchConfig) -> tuple[str, ...]:
    """The switches of `config` that not every attention implementation honours."""
    layers = config.layer_configs()
    return tuple(name for name, demanding in DEMANDS.items() if any(demanding(layer) for layer in layers))


def honours(implementation: str | None, switches: Iterable[str]) -> bool:
    """Whether an attention implementation, if one is chosen yet, does all of these switches."""
    return implementation is None or all(implementation in HONOURS[name] for name in switches)


def refuse_backend(config: LlmArchConfig, implementation: str | None) -> None:
    """
    Raises:
        ValueError: naming the first switch that `implementation` would ignore, and the implementations that would not.
    """
    for name in demands(config):
        if not honours(implementation, (name,)):
            value = next(getattr(layer, name) for layer in config.layer_configs() if DEMANDS[name](layer))
            raise ValueError(
                f"attn_implementation={implementation!r} cannot do {name}={value!r} and would ignore it. "
                f"Use one of: {', '.join(sorted(known for known in KNOWN if known in HONOURS[name]))}."
            )


def repeat_heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """`(B, G, S, D)` -> `(B, G * groups, S, D)`, each head `groups` times in a row."""
    if groups == 1:
        return x
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask to add to scores; one of booleans says where to look. The least number of a narrower dtype would
    not hide the largest scores."""
    if mask.dtype == dtype:
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype).masked_fill(mask == torch.finfo(mask.dtype).min, torch.finfo(dtype).min)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    score_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The host's attention signature in plain operations; honours every switch. Softmax in fp32.

    Returns:
        The output `(B, T, H, D)` and the weights `(B, H, T, S)`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_heads(key, groups), repeat_heads(value, groups)
    if score_dtype is not None:
        query, key = query.to(score_dtype), key.to(score_dtype)
    scores = torch.matmul(query, key.mT) * scaling  # (B, H, T, S)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + additive(attention_mask, scores.dtype)
    if s_aux is not None:
        sink = s_aux.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    weights = F.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# The shape of a query/key norm's weight, given the heads and their width.
QK_NORM_SHAPES: dict[QKNorm, Callable[[int, int], tuple[int, ...]]] = {
    "head": lambda heads, width: (width,),
    "heads": lambda heads, width: (heads, width),
    "projection": lambda heads, width: (heads * width,),
}


class ScoredAttention(nn.Module):
    """What every attention shares: its scale, its options and the call of the host's implementation."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__()
        layer = config.layer(layer_idx)
        # The whole model's config: `set_attn_implementation` changes it there.
        self.config, self.layer_idx = config, layer_idx
        self.is_causal = config.topology != "encoder"
        self.num_key_value_groups = layer.num_attention_heads // layer.num_key_value_heads
        self.scaling = attention_scale(layer, layer_idx)
        self.attention_dropout = layer.attention_dropout
        self.softcap = layer.attn_logit_softcapping
        self.score_dtype = {"score_dtype": torch.float32} if layer.scores_in_fp32 else {}
        slides = layer.layer_types[layer_idx] == "sliding_attention"
        # Read by flash alone, which counts a window of either side with the query itself.
        self.sliding_window = layer.sliding_window + (not self.is_causal) if slides and layer.sliding_window else None
        self.sinks = nn.Parameter(torch.empty(layer.num_attention_heads)) if layer.attention_sinks else None
        has_position = layer_idx not in (layer.nope_layers or ())
        self.rotate = POSITIONS[layer.position_encoding].rotation(layer) if has_position else no_rotation

    def init_weights(self, std: float) -> None:
        if self.sinks is not None:
            init.normal_(self.sinks, mean=0.0, std=std)

    @property
    def options(self) -> dict[str, Any]:
        """What every implementation is told beside the tensors, the scale and the sinks.

        It is called in each `forward` itself, by these names of the host: vLLM finds attention by reading that text.
        """
        return {
            "dropout": self.attention_dropout if self.training else 0.0,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            **self.score_dtype,
        }


class Attention(ScoredAttention):
    """MHA (arXiv 1706.03762), GQA (2305.13245) and MQA (1911.02150): they differ in the number of key/value heads."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = config.layer(layer_idx)
        width, self.head_dim = layer.hidden_size, layer.head_dim
        queries, keys = layer.num_attention_heads, layer.num_key_value_heads
        read_width = self.read_width(config)
        self.q_proj = Linear(width, queries * self.head_dim, bias=layer.attention_bias)
        self.k_proj = Linear(read_width, keys * self.head_dim, bias=layer.attention_bias)
        self.v_proj = Linear(read_width, keys * self.head_dim, bias=layer.attention_bias)
        self.o_proj = Linear(queries * self.head_dim, width, bias=layer.attention_output_bias)
        self.clip = chain(None if layer.clip_qkv is None else Clamp(layer.clip_qkv))
        self.q_norm: Map = unchanged
        self.k_norm: Map = unchanged
        if layer.qk_norm != "none":
            shape = QK_NORM_SHAPES[layer.qk_norm]
            kind, bias = layer.qk_norm_type, layer.qk_norm_bias
            self.q_norm = norm(layer, *shape(queries, self.head_dim), kind=kind, bias=bias)
            self.k_norm = norm(layer, *shape(keys, self.head_dim), kind=kind, bias=bias)
        self.norms_projection = layer.qk_norm == "projection"

    @staticmethod
    def read_width(config: LlmArchConfig) -> int:
        """Width of what keys and values are made from."""
        return config.hidden_size

    def heads(self, x: torch.Tensor, qk_norm: Map = unchanged) -> torch.Tensor:
        """A projection `(B, T, H * D)` as heads `(B, H, T, D)`, of which under tensor parallelism there are some."""
        x = self.clip(x)
        if self.norms_projection:
            x, qk_norm = qk_norm(x), unchanged
        return qk_norm(x.view(*x.shape[:-1], -1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        cache = past_key_values if cache is None else cache
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        q = self.heads(self.q_proj(hidden_states), self.q_norm)  # (B, H, T, D)
        k = self.heads(self.k_proj(hidden_states), self.k_norm)  # (B, G, T, D)
        v = self.heads(self.v_proj(hidden_states))
        q, k = self.rotate(q, k, rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, weights = attention(
            self, q, k, v, attention_mask, scaling=self.scaling, s_aux=self.sinks, **self.options, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class CrossAttention(Attention):
    """A decoder's queries against the encoder's states, which carry their own positions; keys and values are computed
    once a text."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal, self.sliding_window = False, None

    @staticmethod
    def read_width(config: LlmArchConfig) -> int:
        return (config.source_stack or {}).get("hidden_size", config.hidden_size)

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden_states (B, T, C)` read `encoder_hidden_states (B, S, C')`."""
        cache = past_key_values if cache is None else cache
        q = self.heads(self.q_proj(hidden_states), self.q_norm)
        kept = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        if kept is not None and cast(EncoderDecoderCache, cache).is_updated.get(self.layer_idx):
            known = cast(Any, kept.layers[self.layer_idx])
            k, v = known.keys, known.values
        else:
            k = self.heads(self.k_proj(encoder_hidden_states), self.k_norm)
            v = self.heads(self.v_proj(encoder_hidden_states))
            if kept is not None:
                k, v = kept.update(k, v, self.layer_idx)
                cast(EncoderDecoderCache, cache).is_updated[self.layer_idx] = True
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, weights = attention(
            self, q, k, v, attention_mask, scaling=self.scaling, s_aux=self.sinks, **self.options, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights
