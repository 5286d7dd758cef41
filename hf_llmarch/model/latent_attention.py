"""Multi-head latent attention (MLA): keys and values live in one low-rank latent, and only that is cached.

DeepSeek-V2, arXiv 2405.04434 section 2.1. Shapes: `B` batch, `T` query, `S` key, `H` heads, `r` kv_lora_rank, `N` and
`R` the head parts without and with position, `V` value head width.
"""

from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import ScoredAttention, eager_attention
from .configuration_llmarch import LlmArchConfig
from .declarations import Facts, Feature
from .layer_inputs import ScoreInputs
from .linear import Linear
from .norms import norm


def _latent_plan(config: LlmArchConfig, layers: list[LlmArchConfig]) -> dict[str, str]:
    """Queries, expanded keys and expanded values are split by heads; every device computes and caches the whole latent.

    Transformers' style for the latent reads the width of the rotated part from the one config of the whole model, so
    the attention stays whole where layers, or the two stacks, differ in that width.
    """
    rotated = {layer.qk_rope_head_dim for layer in layers}
    if len(rotated) > 1 or "qk_rope_head_dim" in (config.source_stack or {}):
        return {}
    queries = {"q_proj" if layer.q_lora_rank is None else "q_b_proj" for layer in layers}
    plan = {**dict.fromkeys((*queries, "kv_b_proj"), "colwise"), "o_proj": "rowwise"}
    return {**plan, "kv_a_proj_with_mqa": "mla_kv_a_proj"}


def _local_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """A projection's weight as a plain matrix `(rows, columns)`, or this device's rows of one that is split by rows.

    It is for inference: of a weight that is split, only the rows of one device would get a gradient.

    Returns:
        None where the weight is not such a matrix, for example where it is quantised.
    """
    if type(weight) is nn.Parameter:
        return weight
    placements: Any = getattr(weight, "placements", None)
    by_rows = placements is not None and all(placement.is_shard(0) for placement in placements)
    return None if torch.is_grad_enabled() or not by_rows else weight.to_local()  # type: ignore[attr-defined]


class LatentAttention(ScoredAttention):
    """MLA. Few queries against a long context run absorbed: W_UK is folded into the query and W_UV into the output
    (section 2.1.2), so keys and values are never expanded. Prefill and training expand them, to the same numbers.
    """

    facts = Facts(asks=(Feature.TWO_WIDTHS,), tensor_plan=_latent_plan)

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = config.layer(layer_idx)
        width, heads = layer.hidden_size, layer.num_attention_heads
        self.rank, self.nope, self.rope, self.value = (
            layer.kv_lora_rank,
            layer.qk_nope_head_dim,
            layer.qk_rope_head_dim,
            layer.v_head_dim,
        )
        self.cache_is_latent = layer.mla_cache == "latent"
        query_width = heads * (self.nope + self.rope)
        self.compresses_queries = layer.q_lora_rank is not None
        if layer.q_lora_rank is None:
            self.q_proj = Linear(width, query_width, bias=False)
        else:
            self.q_a_proj = Linear(width, layer.q_lora_rank, bias=layer.attention_bias)
            self.q_a_layernorm = norm(layer, layer.q_lora_rank, eps=layer.latent_norm_eps)
            self.q_b_proj = Linear(layer.q_lora_rank, query_width, bias=False)
        self.kv_a_proj_with_mqa = Linear(width, self.rank + self.rope, bias=layer.attention_bias)
        self.kv_a_layernorm = norm(layer, self.rank, eps=layer.latent_norm_eps)
        self.kv_b_proj = Linear(self.rank, heads * (self.nope + self.value), bias=False)
        self.o_proj = Linear(heads * self.value, width, bias=layer.attention_output_bias)

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        """`(B, T, C)` -> `(B, T, H (N + R))`."""
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.compresses_queries else self.q_proj(x)

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
        cache = past_key_values if cache is None else cache
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        lead = hidden_states.shape[:-1]
        q = self.queries(hidden_states).view(*lead, -1, self.nope + self.rope).transpose(1, 2)  # (B, H, T, N + R)
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split((self.rank, self.rope), dim=-1)
        # With a head axis of size 1, every cache layer of transformers can hold them as keys and values.
        latent, k_rope = self.kv_a_layernorm(latent)[:, None], k_rope[:, None]  # (B, 1, T, r), (B, 1, T, R)
        q_rope, k_rope = self.rotate(q_rope, k_rope, rotation)

        if cache is not None and self.cache_is_latent:
            self.refuse_foreign(cache, latent, k_rope)
            latent, k_rope = cache.update(latent, k_rope, self.layer_idx, kwargs=kwargs)
        if self.absorbs(q.shape[-2], latent.shape[-2], attention_mask):
            return self.absorbed(q_nope, q_rope, latent, k_rope, attention_mask)
        k, v = self.expand(latent, k_rope)
        if cache is not None and not self.cache_is_latent:
            self.refuse_foreign(cache, k, v)
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        q = torch.cat((q_nope, q_rope), dim=-1)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        options = self.options(position_bias)
        out, weights = attention(
            self, q, k, v, attention_mask, scaling=self.scaling, s_aux=self.sinks, **options, **kwargs
        )
        return self.o_proj(out.reshape(*lead, -1)), weights

    def refuse_foreign(self, cache: Cache, *new: torch.Tensor) -> None:
        """
        Raises:
            ValueError: the cache holds keys and values of other heads or widths than this layer's, as PEFT makes them
                for prefix tuning.
        """
        layer = cache.layers[self.layer_idx] if self.layer_idx < len(cache.layers) else None
        kept = (getattr(layer, "keys", None), getattr(layer, "values", None))
        for known, mine in zip(kept, new, strict=True):
            if known is not None and known.dim() == 4 and known.shape[1::2] != mine.shape[1::2]:
                raise ValueError(
                    f"The cache of layer {self.layer_idx} holds {known.shape[1]} heads of width {known.shape[3]}, and "
                    f"latent attention keeps {mine.shape[1]} of {mine.shape[3]} (mla_cache={self.config.mla_cache!r}). "
                    "PEFT's prefix tuning cannot make a prefix for it: use prompt tuning, p-tuning or LoRA."
                )

    def expand(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent `(B, 1, S, r)` and the shared rotated key `(B, 1, S, R)` as whole keys `(B, H, S, N + R)` and
        values `(B, H, S, V)`."""
        expanded = self.kv_b_proj(latent[:, 0]).unflatten(-1, (-1, self.nope + self.value)).transpose(1, 2)
        k_nope, v = expanded.split((self.nope, self.value), dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), dim=-1), v

    def absorbs(self, queries: int, keys: int, mask: Any) -> bool:
        """Whether absorbing costs fewer multiplications a head, and can be done here.

        The projection must be a plain one: the weight of a quantised, adapted or offloaded layer is not the matrix that
        the layer multiplies by.
        """
        if self.training or not self.cache_is_latent or self.sinks is not None:
            return False
        up_proj = self.kv_b_proj
        if (
            type(up_proj) not in (Linear, nn.Linear)
            or _local_weight(up_proj.weight) is None
            or hasattr(up_proj, "_hf_hook")
        ):
            return False
        if self.config._attn_implementation not in ("eager", "sdpa") or (mask is None and queries > 1):
            return False
        up = self.rank * (self.nope + self.value)
        absorbed = queries * (keys * (2 * self.rank + self.rope) + up)
        expanded = keys * up + queries * keys * (self.nope + self.rope + self.value)
        return absorbed < expanded

    def absorbed(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the latents themselves: multi-query attention with keys of width r + R and values of r."""
        batch, heads, queries, _ = q_nope.shape
        weight = cast(torch.Tensor, _local_weight(self.kv_b_proj.weight))
        up_k, up_v = weight.view(heads, self.nope + self.value, self.rank).split(
            (self.nope, self.value), dim=1
        )  # (H, N, r), (H, V, r)
        q_latent = torch.matmul(q_nope, up_k)  # (B, H, T, r)
        # All heads read the same keys: as rows of one matrix they need no copy of them.
        q = torch.cat((q_latent, q_rope), dim=-1).view(batch, 1, heads * queries, -1)
        keys = torch.cat((latent, k_rope), dim=-1)  # (B, 1, S, r + R)
        if mask is not None:
            mask = mask.expand(batch, heads, queries, -1).reshape(batch, 1, heads * queries, -1)
        out, weights = eager_attention(self, q, keys, latent, mask, scaling=self.scaling, softcap=self.softcap)
        out = torch.matmul(out.view(batch, heads, queries, self.rank), up_v.mT)  # (B, H, T, V)
        return self.o_proj(out.transpose(1, 2).flatten(2)), weights.view(batch, heads, queries, -1)
