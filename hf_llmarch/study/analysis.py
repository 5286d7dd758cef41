"""What a config implies, worked out without building a model."""

from __future__ import annotations

from dataclasses import dataclass

from hf_llmarch.model.configuration_llmarch import LlmArchConfig


@dataclass(frozen=True)
class LayerReach:
    """How far back, or to either side, the last token of a text sees at one layer.

    Attributes:
        layer: index.
        kind: `full_attention`, `sliding_attention` or `chunked_attention`.
        positions: the position encoding in force, with RoPE's base; `none` for a NoPE layer.
        direct: tokens that the layer's own attention can read, itself included.
        reach: tokens of the input that can have influenced the layer's output, through this and all layers before it.
    """

    layer: int
    kind: str
    positions: str
    direct: int
    reach: int


def receptive_field(config: LlmArchConfig, sequence_length: int | None = None) -> list[LayerReach]:
    """The reach of each layer for the last of `sequence_length` tokens (None: `max_position_embeddings`).

    The earliest token behind a state is found by going down: from a token to the first one that its layer reads, from
    there to the first that the layer below reads, and so on.
    """
    length = sequence_length or config.max_position_embeddings
    field = []
    for i, kind in enumerate(config.layer_types):
        earliest = length - 1
        for below in range(i, -1, -1):
            earliest = first_read(config.layer(below), config.layer_types[below], earliest)
        direct = length - first_read(config.layer(i), kind, length - 1)
        field.append(LayerReach(i, kind, positions_of(config, i, kind), direct, length - earliest))
    return field


def first_read(layer: LlmArchConfig, kind: str, token: int) -> int:
    """Index of the first token that `token` reads at this layer."""
    if kind == "sliding_attention" and layer.sliding_window is not None:
        return max(0, token - layer.sliding_window + (layer.topology != "encoder"))
    if kind == "chunked_attention" and layer.attention_chunk_size is not None:
        return token // layer.attention_chunk_size * layer.attention_chunk_size
    return 0


def positions_of(config: LlmArchConfig, layer: int, kind: str) -> str:
    if layer in (config.nope_layers or ()):
        return "none"
    if config.position_encoding != "rope":
        return config.position_encoding
    parameters = config.rope_by_layer_type[kind]
    return f"rope ({parameters['rope_type']}, theta {parameters['rope_theta']:g})"
