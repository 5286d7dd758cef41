"""Position encodings. Each overrides those of three methods that it needs, all of which do nothing in the base class.

`embed` adds to the embedding, `prepare` computes rotations or score biases once a forward pass, and `rotation` says how
attention rotates queries and keys.

Shapes: `B` batch, `T` query, `S` key, `H` heads, `D` head width, `R` rotated channels, `C` model width.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.utils import is_tracing

from .buffers import Fp32Buffers
from .configuration_llmarch import LlmArchConfig, PositionEncoding
from .declarations import Facts, Feature

# What `prepare` returns: for each layer type, or layer index, the keyword arguments its layers get.
State = dict[str | int, dict[str, Any]]
# In a dict of masks by layer type, the key of the 2-D padding mask that they were made from.
PADDING = "padding"
Rotation = Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]


class Positions(Fp32Buffers):
    """No position encoding: order enters through the causal mask alone."""

    facts = Facts()

    def __init__(self, config: LlmArchConfig):
        super().__init__()
        self.layer_types = list(dict.fromkeys(config.layer_types))

    def embed(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Add absolute positions to the embedding `(B, T, C)`."""
        return x

    def prepare(
        self, x: torch.Tensor, position_ids: torch.Tensor, cache: Cache | None, attention_mask: Any = None
    ) -> State:
        """Compute once a forward what the layers of each type need."""
        return {}

    @staticmethod
    def rotation(config: LlmArchConfig) -> Rotation:
        """A function of queries `(B, H, T, D)`, keys `(B, G, T, D)` and the prepared state that rotates both."""
        return no_rotation


def no_rotation(q: torch.Tensor, k: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


# -- added to the embedding ------------------------------------------------------------------------------------------


class LearnedPositions(Positions, nn.Embedding):
    """A learned row for each position; the table has `position_offset` rows before position 0."""

    facts = Facts(asks=(Feature.BEFORE_LAYERS,))

    def __init__(self, config: LlmArchConfig):
        width = config.embedding_size or config.hidden_size
        nn.Embedding.__init__(self, config.max_position_embeddings + config.position_offset, width)
        self.offset = config.position_offset

    def embed(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return x + nn.Embedding.forward(self, position_ids + self.offset)


class SinusoidalPositions(Positions):
    """sin and cos of position / 10000^(2i/C), arXiv 1706.03762 section 3.5; any length.

    With an endpoint it is 10000^(i/(C/2 - 1)), so that the slowest wave has the full 10000 (tensor2tensor).
    """

    facts = Facts(asks=(Feature.BEFORE_LAYERS,))

    inv_freq: torch.Tensor

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.offset, self.width = config.position_offset, config.embedding_size or config.hidden_size
        self.steps = self.width // 2 - config.sinusoidal_endpoint
        self.skips_padding = config.positions_skip_padding
        self.interleaved = config.sinusoidal_layout == "interleaved"
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> torch.Tensor:
        return 10000.0 ** -(torch.arange(self.width // 2, dtype=torch.float32) / self.steps)

    def init_weights(self, std: float) -> None:
        init.copy_(self.inv_freq, self.frequencies())

    def embed(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        angles = (position_ids[..., None] + self.offset).float() * self.inv_freq.float()  # (B, T, C/2)
        if self.interleaved:
            waves = torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)  # (B, T, C)
        else:
            waves = torch.cat((angles.sin(), angles.cos()), dim=-1)
        if self.skips_padding:
            waves = waves.masked_fill((position_ids < 0)[..., None], 0.0)
        return x + waves.to(x.dtype)


# -- rotations -------------------------------------------------------------------------------------------------------


def _rotate_halves(q: torch.Tensor, k: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the channel pairs (i, i + R/2), as LLaMA and GPT-NeoX lay them out."""
    cos, sin = state
    half = cos.shape[-1] // 2
    return torch.addcmul(q * cos, q.roll(half, -1), sin), torch.addcmul(k * cos, k.roll(half, -1), sin)


def _rotate_neighbours(q: torch.Tensor, k: torch.Tensor, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the channel pairs (2i, 2i + 1), as in arXiv 2104.09864 and GPT-J."""
    cos, sin = state
    return torch.addcmul(q * cos, _swap_neighbours(q), sin), torch.addcmul(k * cos, _swap_neighbours(k), sin)


# A pair (x, y) becomes (x cos - y sin, y cos + x sin): the sin that `RotaryEmbedding` prepares has these signs.


def _swap_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _rotate_part(q: torch.Tensor, k: torch.Tensor, state: Any, rotate: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R channels of a head and leave the others without position."""
    width = state[0].shape[-1]
    rotated_q, rotated_k = rotate(q[..., :width], k[..., :width], state)
    return torch.cat((rotated_q, q[..., width:]), dim=-1), torch.cat((rotated_k, k[..., width:]), dim=-1)


class _RopeView:
    """The few attributes that transformers' frequency functions read, for one layer type.

    Given the config, those functions would take `head_dim` for the rotated width, which for MLA is `qk_rope_head_dim`,
    and look for flat parameters.
    """

    def __init__(self, config: LlmArchConfig, parameters: dict[str, Any]):
        self.head_dim = config.rotary_head_dim
        self.hidden_size, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        self.max_position_embeddings = config.max_position_embeddings
        self.rope_parameters = parameters

    def standardize_rope_params(self) -> None:
        """Do nothing: the config has brought its parameters into transformers' standard form already."""


def _default_frequencies(config: Any, device: Any = None, **kwargs: Any) -> tuple[torch.Tensor, float]:
    """theta^(-2i/R), arXiv 2104.09864; R is the rotated part of a head."""
    parameters = config.rope_parameters
    width = int(config.head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    return 1.0 / parameters["rope_theta"] ** exponents, 1.0


def _ntk_frequencies(config: Any, device: Any = None, **kwargs: Any) -> tuple[torch.Tensor, float]:
    """Static NTK-aware scaling: the base becomes theta * factor^(R/(R-2)), so that the slowest channel is interpolated
    by `factor` and the fastest is left alone."""
    parameters = dict(config.rope_parameters)
    width = int(config.head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    parameters["rope_theta"] = parameters["rope_theta"] * parameters["factor"] ** (width / (width - 2))
    view = _RopeView.__new__(_RopeView)
    view.head_dim, view.rope_parameters = config.head_dim, parameters
    return _default_frequencies(view, device)


# Transformers lacks these two; its own table has linear, dynamic, yarn, longrope and llama3.
ROPE_FREQUENCIES: dict[str, Callable[..., tuple[torch.Tensor, float]]] = {
    **ROPE_INIT_FUNCTIONS,
    "default": _default_frequencies,
    "ntk": _ntk_frequencies,
}


class RotaryEmbedding(Fp32Buffers):
    """cos and sin of position times frequency, for one set of RoPE parameters; angles in fp32."""

    inv_freq: torch.Tensor
    original_inv_freq: torch.Tensor

    def __init__(self, config: LlmArchConfig, parameters: dict[str, Any]):
        super().__init__()
        # The names are those that transformers' `dynamic_rope_update` works on.
        self.config = _RopeView(config, parameters)
        self.rope_type = parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        self.interleaved = config.rope_interleaved
        inv_freq, self.attention_scaling = self.frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def frequencies(self) -> tuple[torch.Tensor, float]:
        return ROPE_FREQUENCIES[self.rope_type](self.config)

    def init_weights(self, std: float) -> None:
        # Buffers that are not saved come back from the meta device as raw memory: they are computed anew.
        inv_freq, _ = self.frequencies()
        init.copy_(self.inv_freq, inv_freq)
        init.copy_(self.original_inv_freq, inv_freq)

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)  # (B, T, R/2)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        cos, sin = self.join(cos, cos).to(x.dtype), self.join(-sin, sin).to(x.dtype)
        return cos[:, None], sin[:, None]  # (B, 1, T, R)

    def join(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """What the first and the second channel of each pair are multiplied by: `(B, T, R/2)` twice -> `(B, T, R)`."""
        return torch.stack((first, second), -1).flatten(-2) if self.interleaved else torch.cat((first, second), -1)


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK, whose frequencies depend on the length of the present text alone, not on earlier texts."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Transformers keeps the frequencies of the longest text so far, and a shorter one would get them too.
        self.max_seq_len_cached = self.original_max_seq_len
        self.inv_freq.copy_(self.original_inv_freq)
        return super().forward(x, position_ids)


def rotary(layer: LlmArchConfig, parameters: dict[str, Any]) -> RotaryEmbedding:
    return (DynamicRotaryEmbedding if parameters["rope_type"] == "dynamic" else RotaryEmbedding)(layer, parameters)


class RotaryPositions(Positions):
    """RoPE, arXiv 2104.09864, with parameters that may differ between layer types."""

    facts = Facts()

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        by_type = config.rope_by_layer_type
        layers = {kind: config.layer(config.layer_types.index(kind)) for kind in by_type}
        # Layer types with equal parameters share one table.
        self.table_of = {
            kind: next(
                other
                for other in by_type
                if by_type[other] == parameters and layers[other].rotary_head_dim == layers[kind].rotary_head_dim
            )
            for kind, parameters in by_type.items()
        }
        self.tables = nn.ModuleDict(
            {kind: rotary(layers[kind], by_type[kind]) for kind in dict.fromkeys(self.table_of.values())}
        )

    def prepare(
        self, x: torch.Tensor, position_ids: torch.Tensor, cache: Cache | None, attention_mask: Any = None
    ) -> State:
        rotations = {kind: table(x, position_ids) for kind, table in self.tables.items()}
        return {kind: {"rotation": rotations[table]} for kind, table in self.table_of.items()}

    @staticmethod
    def rotation(config: LlmArchConfig) -> Rotation:
        rotate = _rotate_neighbours if config.rope_interleaved else _rotate_halves
        factors = [p.get("partial_rotary_factor") or 1.0 for p in config.rope_by_layer_type.values()]
        # MLA passes only the part of a head that is rotated, so there is nothing to split off.
        return rotate if all(factor == 1.0 for factor in factors) else partial(_rotate_part, rotate=rotate)


# -- added to the scores ---------------------------------------------------------------------------------------------


class ScoreBias(Positions):
    """A bias `(1, H, T, S)` on attention scores that depends on key index minus query index alone.

    Left padding and packed sequences therefore need no special treatment. Each layer type has its own bias, because the
    keys of a sliding cache do not begin at index 0.
    """

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.first_layer = {kind: config.layer_types.index(kind) for kind in self.layer_types}

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        """`(H, T, S)` for key index minus query index `(T, S)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement `bias`.")

    def biases(self, distances: dict[str, torch.Tensor]) -> dict[str | int, torch.Tensor]:
        """The bias of each layer type, given its distances."""
        return {kind: self.bias(distance) for kind, distance in distances.items()}

    def prepare(
        self, x: torch.Tensor, position_ids: torch.Tensor, cache: Cache | None, attention_mask: Any = None
    ) -> State:
        length, distances = x.shape[1], {}
        for kind, layer in self.first_layer.items():
            keys, first_key = (length, 0) if cache is None else cache.get_mask_sizes(length, layer)
            query_index = torch.arange(length, device=x.device) + (0 if cache is None else cache.get_seq_length(layer))
            distances[kind] = torch.arange(keys, device=x.device) + first_key - query_index[:, None]  # (T, S)
        return {key: {"position_bias": bias.to(x.dtype)[None]} for key, bias in self.biases(distances).items()}


class AlibiPositions(ScoreBias):
    """-slope * distance, arXiv 2108.12409: closer keys score higher, and each head has a slope of its own."""

    facts = Facts(asks=(Feature.SCORE_BIAS,))

    slopes: torch.Tensor

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.in_bf16, self.follows_mask = config.alibi_in_bf16, config.positions_follow_mask
        self.heads, self.bias_max = config.num_attention_heads, config.alibi_bias_max
        self.factor = attention_scale(config) if config.alibi_scaled else 1.0
        # An explicit dtype: a model loaded in bf16 would otherwise round the slopes.
        self.register_buffer("slopes", alibi_slopes(self.heads, self.bias_max), persistent=False)

    def init_weights(self, std: float) -> None:
        init.copy_(self.slopes, alibi_slopes(self.heads, self.bias_max))

    def bias(self, distance: torch.Tensor) -> torch.Tensor:
        return self.slopes.float()[:, None, None] * (-distance.abs() * self.factor)[..., None, :, :]

    def prepare(
        self, x: torch.Tensor, position_ids: torch.Tensor, cache: Cache | None, attention_mask: Any = None
    ) -> State:
        if self.in_bf16:
            return self.rounded(x, cache, attention_mask)
        if self.follows_mask:
            mask = attention_mask.get(PADDING) if isinstance(attention_mask, dict) else attention_mask
            if mask is not None and mask.dim() == 2 and (is_tracing(mask) or has_holes(mask)):
                return self.among_kept(x, cache, mask)
        return super().prepare(x, position_ids, cache, attention_mask)

    def among_kept(self, x: torch.Tensor, cache: Cache | None, mask: torch.Tensor) -> State:
        """`(B, H, T, S)`: distances count the tokens that a mask keeps. Without holes in it they are those of indices,
        which one bias for all rows has."""
        length, state = x.shape[1], cast(State, {})
        for kind, layer in self.first_layer.items():
            keys, first_key = (length, 0) if cache is None else cache.get_mask_sizes(length, layer)
            past = 0 if cache is None else cache.get_seq_length(layer)
            places = mask.cumsum(-1)
            places = F.pad(places, (0, max(0, first_key + keys - places.shape[-1])))
            distance = places[:, None, first_key : first_key + keys] - places[:, past : past + length, None]
            state[kind] = {"position_bias": self.bias(distance).to(x.dtype)}
        return state

    def rounded(self, x: torch.Tensor, cache: Cache | None, attention_mask: Any) -> State:
        """Falcon's form, `(B, H, 1, S)`: slope times the key's place among the real tokens, a product rounded to bf16.

        Rounding makes it depend on where a text begins, so the places come from the padding mask.
        """
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[PADDING]
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(
                "alibi_in_bf16=True counts real tokens, so it needs the 2-D attention mask, not a 4-D one."
            )
        length = x.shape[1]
        state: State = {}
        for kind, layer in self.first_layer.items():
            keys, first_key = (length, 0) if cache is None else cache.get_mask_sizes(length, layer)
            if attention_mask is None:
                places = torch.arange(first_key + keys, device=x.device)[None]
            else:
                places = (attention_mask.cumsum(-1) - 1) * attention_mask
                places = F.pad(places, (0, max(0, first_key + keys - places.shape[-1])))
            places = places[:, None, first_key : first_key + keys]  # (B, 1, S)
            bias = (self.slopes[:, None].bfloat16() * places).to(x.dtype) * self.factor  # (B, H, S)
            state[kind] = {"position_bias": bias[:, :, None]}
        return state


def has_holes(mask: torch.Tensor) -> torch.Tensor:
    """Whether a row of a mask `(B, S)` leaves out tokens between others that it keeps."""
    kept = mask.bool()
    return (~kept & (kept.cumsum(-1) > 0) & (kept.flip(-1).cumsum(-1).flip(-1) > 0)).any()


def alibi_slopes(heads: int, bias_max: int) -> torch.Tensor:
    """2^(-bias_max k / n) for k = 1..n where n heads are a power of two; else the sequence of the next power of two,
    its even members first, then the odd ones, cut to the number of heads (the reference implementation's rule)."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 2.0 ** -(bias_max * torch.arange(1, power + 1, dtype=torch.float32) / power)
    return slopes if power == heads else torch.cat((slopes[1::2], slopes[0::2]))[:heads]


class RelativeBias(ScoreBias):
    """T5's learned bias for each head and each bucket of distances, arXiv 1910.10683; one table serves all layers, or
    each layer has its own."""

    facts = Facts(asks=(Feature.SCORE_BIAS,))

    def __init__(self, config: LlmArchConfig):
        super().__init__(config)
        self.buckets, self.max_distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
        self.bidirectional = config.topology == "encoder"
        self.kinds, self.shared = config.layer_types, config.relative_attention_shared
        placed = [i for i in range(len(self.kinds)) if i not in (config.nope_layers or ())]
        tables = {str(i): nn.Embedding(self.buckets, config.num_attention_heads) for i in placed}
        self.relative_attention_bias: nn.Module = tables[str(placed[0])] if self.shared else nn.ModuleDict(tables)

    def biases(self, distances: dict[str, torch.Tensor]) -> dict[str | int, torch.Tensor]:
        buckets = {
            kind: _relative_buckets(distance, self.buckets, self.max_distance, self.bidirectional)
            for kind, distance in distances.items()
        }
        if self.shared:
            return {kind: self.relative_attention_bias(bucket).permute(2, 0, 1) for kind, bucket in buckets.items()}
        tables = cast(nn.ModuleDict, self.relative_attention_bias)
        return {int(i): table(buckets[self.kinds[int(i)]]).permute(2, 0, 1) for i, table in tables.items()}


def _relative_buckets(distance: torch.Tensor, buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """T5's bucket of each distance `(T, S)`, arXiv 1910.10683 section 2.1.

    The first half of the buckets holds one distance each, the second grows logarithmically up to `max_distance`. In an
    encoder, keys after the query have buckets of their own: half of all.
    """
    side = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        side = (distance > 0) * buckets
    away = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = buckets // 2
    log = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    return side + torch.where(away < exact, away, (exact + log.long()).clamp(max=buckets - 1))


POSITIONS: dict[PositionEncoding, type[Positions]] = {
    "none": Positions,
    "sinusoidal": SinusoidalPositions,
    "learned": LearnedPositions,
    "rope": RotaryPositions,
    "alibi": AlibiPositions,
    "relative_bias": RelativeBias,
}


def attention_scale(config: LlmArchConfig, layer_idx: int = 0) -> float:
    """The factor on q.k: as configured, else 1/sqrt(query/key width)."""
    scale = config.query_key_head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    if config.attention_kind == "mla" and config.attention_scale is None:
        scale *= _yarn_mscale(config.rope_by_layer_type[config.layer_types[layer_idx]]) ** 2
    return scale / (layer_idx + 1) if config.attention_scale_by_layer else scale


def _yarn_mscale(parameters: dict[str, Any]) -> float:
    """0.1 * mscale_all_dim * ln(factor) + 1, DeepSeek's correction of the softmax scale under YaRN; else 1."""
    mscale, factor = parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    if parameters.get("rope_type") != "yarn" or not mscale or factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0
