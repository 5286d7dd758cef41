"""Attention with whole keys and values: MHA, GQA, MQA, and every switch on their scores.

Shapes: `B` batch, `T` query, `S` key, `H` query heads, `G` key/value heads, `D` head width.
"""

from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_llmarch import LlmArchConfig, QKNorm
from .declarations import SHARED, Facts
from .embeddings import Clamp, TensorFn, identity, in_sequence
from .layer_inputs import ScoreInputs
from .linear import Linear
from .norms import norm
from .positions import POSITIONS, attention_scale, no_rotation


def _repeat_heads(x: torch.Tensor, groups: int) -> torch.Tensor:
    """`(B, G, S, D)` -> `(B, G * groups, S, D)`, each head `groups` times in a row."""
    if groups == 1:
        return x
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as numbers that are added to the scores; a boolean mask is True where a query may look.

    A mask of a narrower dtype is cast, and its least number, which would not hide the largest scores, becomes the least
    number of `dtype`.
    """
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
    """Attention in plain operations, with transformers' signature. It honours every feature; its softmax is in fp32.

    Args:
        query: `(B, H, T, D)`.
        key: `(B, G, S, D)`.
        value: `(B, G, S, V)`, where the width V may differ from D.
        attention_mask: `(B or 1, 1, T, S)`, added to the scores, or True where a query may look.
        scaling: the factor on q.k.
        softcap: the bound on the scores, applied before the bias and the mask. None: there is none.
        position_bias: `(B or 1, H, T, S)`, added to the scores.
        s_aux: `(H,)`, the attention sinks.

    Returns:
        The output `(B, T, H, D)` and the weights `(B, H, T, S)`.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = _repeat_heads(key, groups), _repeat_heads(value, groups)
    if score_dtype is not None:
        query, key = query.to(score_dtype), key.to(score_dtype)
    scores = torch.matmul(query, key.mT) * scaling  # (B, H, T, S)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores + _additive(attention_mask, scores.dtype)
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
    """What every attention shares: its scale, its options and the call of transformers' implementation."""

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
        # Only flash attention reads this; its window of an encoder counts the query itself.
        self.sliding_window = layer.sliding_window + (not self.is_causal) if slides and layer.sliding_window else None
        self.sinks = nn.Parameter(torch.empty(layer.num_attention_heads)) if layer.attention_sinks else None
        has_position = layer_idx not in (layer.nope_layers or ())
        self.rotate = POSITIONS[layer.position_encoding].rotation(layer) if has_position else no_rotation

    def init_weights(self, std: float) -> None:
        if self.sinks is not None:
            init.normal_(self.sinks, mean=0.0, std=std)

    def options(self, position_bias: torch.Tensor | None = None) -> dict[str, Any]:
        """The keyword arguments of every implementation, beside the tensors, the scale and the sinks.

        Each `forward` calls the implementation itself under transformers' variable names, because vLLM finds attention
        by reading the source text of `forward`.

        Args:
            position_bias: `(1 or B, H, T, S)`, added to the scores. Where it is None it is left out, so that
                implementations that know no bias are not asked about one.
        """
        options: dict[str, Any] = {
            "dropout": self.attention_dropout if self.training else 0.0,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            **self.score_dtype,
        }
        return options if position_bias is None else {**options, "position_bias": position_bias}


def plan_by_heads(config: LlmArchConfig, layers: list[LlmArchConfig]) -> dict[str, str]:
    """Every projection is split by heads; every device holds a norm that has one weight for all heads."""
    plan = {**{f"{name}_proj": "colwise" for name in "qkv"}, "o_proj": "rowwise"}
    norms = any(layer.qk_norm == "head" for layer in layers)
    return plan | ({"q_norm": SHARED, "k_norm": SHARED} if norms else {})


class Attention(ScoredAttention):
    """MHA (arXiv 1706.03762), GQA (2305.13245) and MQA (1911.02150): they differ in the number of key/value heads."""

    facts = Facts(tensor_plan=plan_by_heads)

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
        self.clip = in_sequence(None if layer.clip_qkv is None else Clamp(layer.clip_qkv))
        self.q_norm: TensorFn = identity
        self.k_norm: TensorFn = identity
        if layer.qk_norm != "none":
            shape = QK_NORM_SHAPES[layer.qk_norm]
            kind, bias = layer.qk_norm_type, layer.qk_norm_bias
            self.q_norm = norm(layer, *shape(queries, self.head_dim), kind=kind, bias=bias)
            self.k_norm = norm(layer, *shape(keys, self.head_dim), kind=kind, bias=bias)
        self.norms_projection = layer.qk_norm == "projection"
        self.adjusts_projections = layer.clip_qkv is not None or layer.qk_norm != "none"

    @staticmethod
    def read_width(config: LlmArchConfig) -> int:
        """Width of the states that keys and values are projected from."""
        return config.hidden_size

    def heads(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The projections `(B, T, H * D)`, `(B, T, G * D)` twice, as heads `(B, H, T, D)`, `(B, G, T, D)` twice."""
        if self.adjusts_projections:
            return self.adjusted(q, self.q_norm), self.adjusted(k, self.k_norm), self.adjusted(v)
        shape = (*q.shape[:-1], -1, self.head_dim)  # under tensor parallelism each device has some of the heads
        return q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)

    def adjusted(self, x: torch.Tensor, qk_norm: TensorFn = identity) -> torch.Tensor:
        """A projection `(B, T, H * D)` as heads `(B, H, T, D)`, clipped and normed as the config says."""
        x = self.clip(x)
        if self.norms_projection:
            x, qk_norm = qk_norm(x), identity
        return qk_norm(x.view(*x.shape[:-1], -1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        position_bias: torch.Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[ScoreInputs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention output `(B, T, C)`, and the weights `(B, H, T, S)` where the implementation returns them.

        Args:
            hidden_states: `(B, T, C)`.
            rotation: what `Positions.rotation` turns queries and keys by; None without RoPE.
            position_bias: `(1, H, T, S)`, added to the scores.
            cache: the keys and values so far, which this call extends; also accepted as `past_key_values`.
            attention_mask, kwargs: see `AttentionInputs`.
        """
        cache = past_key_values if cache is None else cache
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        q, k, v = self.heads(self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states))
        q, k = self.rotate(q, k, rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        options = self.options(position_bias)
        out, weights = attention(
            self, q, k, v, attention_mask, scaling=self.scaling, s_aux=self.sinks, **options, **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


class CrossAttention(Attention):
    """Cross-attention of a decoder to its encoder's states, which carry positions already. Keys and values are computed
    once for each text."""

    facts = Facts(tensor_plan=plan_by_heads)

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
        **kwargs: Unpack[ScoreInputs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden_states (B, T, C)` read `encoder_hidden_states (B, S, C')`."""
        cache = past_key_values if cache is None else cache
        q = self.adjusted(self.q_proj(hidden_states), self.q_norm)
        kept = cache.cross_attention_cache if isinstance(cache, EncoderDecoderCache) else None
        if kept is not None and cast(EncoderDecoderCache, cache).is_updated.get(self.layer_idx):
            known = cast(Any, kept.layers[self.layer_idx])
            k, v = known.keys, known.values
        else:
            k = self.adjusted(self.k_proj(encoder_hidden_states), self.k_norm)
            v = self.adjusted(self.v_proj(encoder_hidden_states))
            if kept is not None:
                k, v = kept.update(k, v, self.layer_idx)
                cast(EncoderDecoderCache, cache).is_updated[self.layer_idx] = True
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, weights = attention(
            self, q, k, v, attention_mask, scaling=self.scaling, s_aux=self.sinks, **self.options(), **kwargs
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights
