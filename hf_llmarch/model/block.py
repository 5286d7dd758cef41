"""One layer: attention and feed-forward as branches of the residual stream."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention, CrossAttention
from .compat import CACHE
from .configuration_llmarch import AttentionType, LlmArchConfig
from .embeddings import Fp16Bound, Map, Scale, chain, dropout, unchanged
from .experts import SPARSE_FEED_FORWARDS
from .feedforward import FEED_FORWARDS
from .latent_attention import LatentAttention
from .norms import NORM_SLOTS, NormSlots

ATTENTIONS: dict[AttentionType, type[nn.Module]] = {
    "mha": Attention,
    "gqa": Attention,
    "mqa": Attention,
    "mla": LatentAttention,
}


def feed_forward(config: LlmArchConfig, layer_idx: int) -> nn.Module:
    layer = config.layer(layer_idx)
    if layer.mlp_layer_types is not None and layer.mlp_layer_types[layer_idx] == "sparse":
        return SPARSE_FEED_FORWARDS[layer.router_type](config, layer)
    return FEED_FORWARDS[layer.ffn_type](layer)


class Block(GradientCheckpointingLayer):
    """Attention, then feed-forward; each branch f is out(x + post(f(pre(x))))."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__()
        layer = config.layer(layer_idx)
        self.self_attn = ATTENTIONS[layer.attention_kind](config, layer_idx)
        self.mlp = feed_forward(config, layer_idx)
        attn_slots, mlp_slots = self.norm_slots(layer)
        if layer_idx == 0 and not layer.first_attention_norm:
            attn_slots = attn_slots - {"pre"}
        self.attn_norm, self.mlp_norm = NormSlots(layer, attn_slots), NormSlots(layer, mlp_slots)
        self.residual = chain(
            dropout(layer.hidden_dropout), Scale(layer.residual_scale) if layer.residual_scale != 1.0 else None
        )
        self.bound: Map = Fp16Bound() if layer.fp16_clamp == "branch" else unchanged
        self.last_bound: Map = unchanged if layer.fp16_clamp == "none" else Fp16Bound()

    @staticmethod
    def norm_slots(layer: LlmArchConfig) -> tuple[set[str], set[str]]:
        """The slots that hold a norm around attention and around the feed-forward."""
        return NORM_SLOTS[layer.norm_placement], NORM_SLOTS[layer.norm_placement]

    def attend(self, x: torch.Tensor, position_bias: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        norm = self.attn_norm
        return self.residual(norm.post(self.read_self(norm.pre(x), position_bias, **kwargs)))

    def read_self(self, x: torch.Tensor, position_bias: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        # Absent rather than None: attention implementations that know no bias are not asked about one.
        biased = {} if position_bias is None else {"position_bias": position_bias}
        return self.self_attn(x, **biased, **kwargs)[0]

    def feed(self, x: torch.Tensor, real_tokens: torch.Tensor | None) -> torch.Tensor:
        norm = self.mlp_norm
        return self.residual(norm.post(self.mlp(norm.pre(x), real_tokens)))

    def forward(
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`(B, T, C)` -> `(B, T, C)`; `real_tokens (B, T)` tells experts what is padding, the rest is attention's."""
        x = self.bound(self.attn_norm.out(x + self.attend(x, position_bias, **kwargs)))
        return self.last_bound(self.mlp_norm.out(x + self.feed(x, real_tokens)))


class ParallelBlock(Block):
    """Both branches read the same input, each through a norm of its own (GPT-NeoX)."""

    def forward(
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return self.last_bound(x + self.attend(x, position_bias, **kwargs) + self.feed(x, real_tokens))


class SharedNormParallelBlock(Block):
    """Both branches read the same normed input (GPT-J)."""

    @staticmethod
    def norm_slots(layer: LlmArchConfig) -> tuple[set[str], set[str]]:
        return {"pre"}, set()

    def forward(
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        normed = self.attn_norm.pre(x)
        attended = self.read_self(normed, position_bias, **kwargs)
        return self.last_bound(x + self.residual(attended) + self.residual(self.mlp(normed, real_tokens)))


class CrossBlock(Block):
    """A decoder's block that also reads an encoder, between its attention and its feed-forward."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = config.layer(layer_idx)
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_norm = NormSlots(layer, NORM_SLOTS[layer.norm_placement])

    def read(self, x: torch.Tensor, source: torch.Tensor, mask: torch.Tensor | None, **kwargs: Any) -> torch.Tensor:
        out, _ = self.cross_attn(self.cross_norm.pre(x), source, attention_mask=mask, **kwargs)
        return self.residual(self.cross_norm.post(out))

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`(B, T, C)` and the encoder's `(B, S, C')` -> `(B, T, C)`."""
        x = self.bound(self.attn_norm.out(x + self.attend(x, position_bias, **kwargs)))
        cache = {name: kwargs[name] for name in (CACHE,) if name in kwargs}
        x = self.bound(self.cross_norm.out(x + self.read(x, encoder_hidden_states, encoder_attention_mask, **cache)))
        return self.last_bound(self.mlp_norm.out(x + self.feed(x, real_tokens)))


# Keyed by the config's `parallel_block` and `parallel_norms`, and whether there is an encoder to read.
BLOCKS: dict[tuple[bool, int, bool], type[Block]] = {
    (False, 1, False): Block,
    (True, 1, False): SharedNormParallelBlock,
    (True, 2, False): ParallelBlock,
    (False, 1, True): CrossBlock,
}


def block(config: LlmArchConfig, layer_idx: int) -> Block:
    layer = config.layer(layer_idx)
    kind = (layer.parallel_block, layer.parallel_norms, config.topology == "encoder-decoder")
    return BLOCKS[kind](config, layer_idx)
