"""One layer: attention and feed-forward as branches of the residual stream.

Shapes: `B` batch, `T` query, `S` source (what a decoder reads of an encoder), `C` width.
"""

from typing import Unpack, cast

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import Attention, CrossAttention
from .compat import CACHE
from .configuration_llmarch import AttentionType, LlmArchConfig
from .experts import SPARSE_FEED_FORWARDS
from .feedforward import dense_feed_forward
from .latent_attention import LatentAttention
from .layer_inputs import AttentionInputs, CacheInputs
from .norms import NORM_SLOTS, norm_slots
from .routing import ROUTERS

ATTENTIONS: dict[AttentionType, type[nn.Module]] = {
    "mha": Attention,
    "gqa": Attention,
    "mqa": Attention,
    "mla": LatentAttention,
}


def feed_forward(config: LlmArchConfig, layer_idx: int) -> nn.Module:
    """The feed-forward of a layer: dense, or a mixture of experts."""
    layer = config.layer(layer_idx)
    if layer.mlp_layer_types is not None and layer.mlp_layer_types[layer_idx] == "sparse":
        return SPARSE_FEED_FORWARDS[ROUTERS[layer.router_type].pickers](config, layer)
    return dense_feed_forward(layer)


class Block(GradientCheckpointingLayer):
    """Attention, then feed-forward, each a branch of the residual stream (see `norms.NormSlots`)."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__()
        layer = config.layer(layer_idx)
        # What the model's config must go on saying of the place where the layer stands.
        self.layer_type, self.has_position = layer.layer_types[layer_idx], layer_idx not in (layer.nope_layers or ())
        self.self_attn = ATTENTIONS[layer.attention_kind](config, layer_idx)
        self.mlp = feed_forward(config, layer_idx)
        attn_slots, mlp_slots = self.slots(layer)
        if layer_idx == 0 and not layer.first_attention_norm:
            attn_slots = attn_slots - {"pre"}
        self.attn_norm, self.mlp_norm = norm_slots(layer, attn_slots), norm_slots(layer, mlp_slots, ends_layer=True)

    @staticmethod
    def slots(layer: LlmArchConfig) -> tuple[set[str], set[str]]:
        """The slots that hold a norm around attention and around the feed-forward."""
        return NORM_SLOTS[layer.norm_placement], NORM_SLOTS[layer.norm_placement]

    # `x`, `position_bias`, and in a `CrossBlock` the encoder's states are passed by position, because reentrant
    # gradient checkpoints carry gradients through positional arguments only.
    def forward(
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **inputs: Unpack[AttentionInputs],
    ) -> torch.Tensor:
        """`(B, T, C)` -> `(B, T, C)`.

        Args:
            position_bias: `(1 or B, H, T, S)`, added to the scores of attention; None: nothing is.
            real_tokens: `(B, T)`, True where a token is not padding; None: all are real. Experts read it.
        """
        x = self.attn_norm.join(x, self.self_attn(self.attn_norm.pre(x), position_bias=position_bias, **inputs)[0])
        return self.mlp_norm.join(x, self.mlp(self.mlp_norm.pre(x), real_tokens))


class ParallelBlock(Block):
    """Both branches read the same input, each through a norm of its own (GPT-NeoX)."""

    def forward(
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **inputs: Unpack[AttentionInputs],
    ) -> torch.Tensor:
        """As `Block.forward`."""
        attended = self.self_attn(self.attn_norm.pre(x), position_bias=position_bias, **inputs)[0]
        fed = self.mlp(self.mlp_norm.pre(x), real_tokens)
        return self.mlp_norm.join(x + self.attn_norm.after(attended), fed)


class SharedNormParallelBlock(Block):
    """Both branches read the same normed input (GPT-J)."""

    @staticmethod
    def slots(layer: LlmArchConfig) -> tuple[set[str], set[str]]:
        return {"pre"}, set()

    def forward(
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **inputs: Unpack[AttentionInputs],
    ) -> torch.Tensor:
        """As `Block.forward`."""
        normed = self.attn_norm.pre(x)
        attended, fed = self.self_attn(normed, position_bias=position_bias, **inputs)[0], self.mlp(normed, real_tokens)
        return self.mlp_norm.join(x + self.attn_norm.after(attended), fed)


class CrossBlock(Block):
    """A decoder's block that also reads an encoder, between its attention and its feed-forward."""

    def __init__(self, config: LlmArchConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layer = config.layer(layer_idx)
        self.cross_attn = CrossAttention(config, layer_idx)
        self.cross_norm = norm_slots(layer, NORM_SLOTS[layer.norm_placement])

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        position_bias: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
        real_tokens: torch.Tensor | None = None,
        **inputs: Unpack[AttentionInputs],
    ) -> torch.Tensor:
        """As `Block.forward`, reading the encoder's states `(B, S, C')`; its mask is `(B or 1, 1, T, S)`."""
        x = self.attn_norm.join(x, self.self_attn(self.attn_norm.pre(x), position_bias=position_bias, **inputs)[0])
        kept = cast(CacheInputs, {name: cache for name, cache in inputs.items() if name == CACHE})
        read, _ = self.cross_attn(
            self.cross_norm.pre(x), encoder_hidden_states, attention_mask=encoder_attention_mask, **kept
        )
        x = self.cross_norm.join(x, read)
        return self.mlp_norm.join(x, self.mlp(self.mlp_norm.pre(x), real_tokens))


# Keyed by the config's `parallel_block` and `parallel_norms`, and whether there is an encoder to read.
BLOCKS: dict[tuple[bool, int, bool], type[Block]] = {
    (False, 1, False): Block,
    (True, 1, False): SharedNormParallelBlock,
    (True, 2, False): ParallelBlock,
    (False, 1, True): CrossBlock,
}


def block(config: LlmArchConfig, layer_idx: int) -> Block:
    """The block of a layer, as the config of that layer says."""
    layer = config.layer(layer_idx)
    kind = (layer.parallel_block, layer.parallel_norms, config.topology == "encoder-decoder")
    return BLOCKS[kind](config, layer_idx)
