"""Multi-head latent attention out of attention with whole keys and values.

Shapes: `H` query heads, `G` key/value heads, `D` head width, `P` channel pairs of a head that RoPE rotates, `C` model
width; of the result, `r` kv_lora_rank, `N` and `R` the parts of a head without and with position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_llmarch.model.configuration_llmarch import LlmArchConfig
from hf_llmarch.model.positions import attention_scale, rotary

from .heads import KEYS, QUERIES, VALUES, second_moments, with_bias
from .operation import operation
from .subject import Change, Move, Subject, refuse

# eps of the norms on the latents. Next to it the mean square of a latent vanishes in fp32 up to a root mean square of
# 2^8, so a norm is a factor 2^-20, which a gain of 2^20 takes back without losing a bit.
EPS, GAIN = 2.0**40, 2.0**20


@dataclass(frozen=True)
class Split:
    """What of a layer type's keys keeps its rotation.

    Attributes:
        pairs: the channels of a head that are rotated together, `(2, P)`.
        rest: the channels that are not rotated.
        kept: for each pair, how many of the G components over the heads stay rotated.
        scaling: what RoPE multiplies queries and keys with (YaRN's attention factor).
    """

    pairs: Tensor
    rest: Tensor
    kept: Sequence[int]
    scaling: float


@operation
def to_mla(subject: Subject, kv_lora_rank: int | None = None, qk_rope_head_dim: int | None = None) -> Change:
    """Latent attention in place of MHA, GQA or MQA: exact at full rank (the algebra of TransMLA, arXiv 2502.07864).

    A score of head h is Re(sum over pairs i of conj(q_hi) e^(..) k_gi), with g the key/value head of h. MLA has one
    rotated key for all heads. Put the keys of all G heads into it, each at a place of its own, and let the query of h
    be zero but at the places of its g: the same sum. So with R = 2 P G nothing is lost, and the frequencies, which
    repeat for each head, are written as LongRoPE factors. Values, and channels that are not rotated, come from the
    latent; at rank G (D + N), or C where that is less, so are they what they were.

    With a smaller R each pair's G keys are first brought into their principal components over the sample, which a
    unitary matrix does that RoPE commutes with; the components with the largest share in the scores, key energy times
    query energy, keep their rotation, and the others lose it: this is the approximation. With R = 2 P it is the first
    one of each pair, so that the frequencies are RoPE's own. A smaller rank is the least squares fit to keys without
    position and values on the sample, both scaled to one energy.

    MLA norms its latents. Here `latent_norm_eps` is so large that these norms are factors, which their gains take back;
    a LayerNorm also gets a channel that brings the mean to zero. Biases of queries need a compressed query, at full
    rank.

    Args:
        kv_lora_rank: of the latent, the norm's own channel not counted. None: full.
        qk_rope_head_dim: R. None: 2 P G, which is exact.

    Raises:
        SurgeryError: for fp16, which the norms' factors leave; for a `rope_type` whose frequencies follow the text's
            length, unless R leaves them as they are; by the config's rules for `qk_norm`, `clip_qkv` and encodings
            other than RoPE.
    """
    config = subject.config
    refuse(config.attention_kind == "mla", "attention_type='mla' already.")
    refuse(config.is_heterogeneous, "per_layer_config: the layers' heads have to be alike.")
    refuse(
        subject.dtype == torch.float16, "dtype=float16 cannot hold the norms' gains of 2^20: cast to bfloat16 first."
    )
    # By the rules of the config, before anything is computed.
    subject.changed(**switches_of(config, 1, 2, 1, {kind: {"rope_type": "default"} for kind in config.layer_types}))
    groups, width = config.num_key_value_heads, config.head_dim
    pairs = {kind: pairs_of(config, parameters) for kind, parameters in config.rope_by_layer_type.items()}
    refuse(len({p.numel() for p in pairs.values()}) > 1, "rope_parameters rotate differently wide parts by layer type.")
    count = next(iter(pairs.values())).shape[1]
    rotated = 2 * count * groups if qk_rope_head_dim is None else qk_rope_head_dim
    refuse(
        rotated % 2 != 0 or not 2 <= rotated <= 2 * count * groups,
        f"qk_rope_head_dim={rotated} must be even, and from 2 to {2 * count * groups}.",
    )
    whole = rotated == 2 * count * groups
    still = width - 2 * count if whole else width
    extent = groups * (still + width)
    # What has no position, and values: rows that can be independent of each other.
    full = min(groups * 2 * width - rotated, config.hidden_size + config.attention_bias)
    rank = full if kv_lora_rank is None else kv_lora_rank
    refuse(not 0 < rank <= extent, f"kv_lora_rank={rank} must be from 1 to {extent}, the rows that it is to hold.")
    exact = whole and rank >= full
    moments: list[Tensor | None] = [None] * len(subject.blocks())
    if not exact:
        moments = [*second_moments(subject, "self_attn.k_proj")]
    kinds = config.layer_types
    bases = [None if whole else components(subject, i, pairs[kinds[i]], moments[i]) for i in range(len(moments))]
    splits: dict[str, Split] = {}
    parameters: dict[str, dict[str, Any]] = {}
    for kind, rotary_parameters in config.rope_by_layer_type.items():
        kept = [groups] * count
        if not whole:
            shares = torch.stack([basis[1] for basis, own in zip(bases, kinds, strict=True) if basis and own == kind])
            kept = [1] * count if rotated == 2 * count else most(shares.mean(0), rotated // 2)
        table = rotary(config.layer(kinds.index(kind)), rotary_parameters)
        rest = torch.tensor([d for d in range(width) if d not in pairs[kind].flatten().tolist()], dtype=torch.long)
        splits[kind] = Split(pairs[kind], rest, kept, float(table.attention_scaling))
        parameters[kind] = rope_parameters(
            config, rotary_parameters, kept, table.inv_freq, float(table.attention_scaling)
        )
    heads = {kind: still_width(split, groups) for kind, split in splits.items()}
    still = max(1, *heads.values())
    moves = []
    for i, (prefix, _) in enumerate(subject.blocks()):
        basis = bases[i]
        unitary = torch.eye(groups).expand(count, -1, -1).to(torch.complex128) if basis is None else basis[0]
        build = Builder(config, splits[kinds[i]], unitary, rank, still, rotated, moments[i])
        sources = subject.have(prefix, *QUERIES, *KEYS, *VALUES)
        targets = [f"{prefix}self_attn.{name}" for name in build.names]
        moves.append(Move(tuple(sources), tuple(targets), build))
    result = subject.changed(moves, **switches_of(config, rank, rotated, still, parameters))
    if exact:
        return Change(result, True, "One rotated key holds the keys of all heads, and the latent has full rank.")
    lost = (
        []
        if whole
        else [f"{2 * count * groups - rotated} of {2 * count * groups} channels of keys have no position any more"]
    )
    lost += [] if rank >= full else [f"the latent has rank {rank} of {full}"]
    return Change(result, False, f"{', and '.join(lost)}.", "all weights")


def switches_of(
    config: LlmArchConfig, rank: int, rotated: int, still: int, parameters: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The switches of the result."""
    centred = config.norm_type == "layernorm"
    queries = config.num_attention_heads * config.head_dim + centred if config.attention_bias else None
    flat = parameters if len(parameters) != 1 else next(iter(parameters.values()))
    return {
        **{"attention_type": "mla", "num_key_value_heads": config.num_attention_heads, "q_lora_rank": queries},
        **{"kv_lora_rank": rank + centred, "qk_nope_head_dim": still, "qk_rope_head_dim": rotated},
        **{"v_head_dim": config.head_dim, "head_dim": rotated, "latent_norm_eps": EPS},
        # By layer, the scale is divided by the layer's number afterwards, as before.
        "attention_scale": attention_scale(config) if config.attention_scale is None else config.attention_scale,
        "rope_parameters": flat if config.position_encoding == "rope" else config.rope_parameters,
    }


def pairs_of(config: LlmArchConfig, parameters: dict[str, Any]) -> Tensor:
    """The channels of a head that are rotated together, `(2, P)`."""
    width = int(config.head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    channels = torch.arange(width)
    return channels.view(-1, 2).T if config.rope_interleaved else channels.view(2, -1)


def still_width(split: Split, groups: int) -> int:
    """Channels of a head without position: never rotated, or of pairs that lose a component's rotation."""
    return len(split.rest) + 2 * sum(n < groups for n in split.kept)


def rope_parameters(
    config: LlmArchConfig, old: dict[str, Any], kept: Sequence[int], frequencies: Tensor, scaling: float
) -> dict[str, Any]:
    """RoPE's parameters for a rotated part in which pair i is there `kept[i]` times."""
    if all(n == 1 for n in kept):
        return {name: value for name, value in old.items() if name != "partial_rotary_factor"}
    refuse(
        old["rope_type"] in ("dynamic", "longrope"),
        f"rope_type={old['rope_type']!r} has frequencies that follow the text's length, which cannot be written for a "
        "rotated part of another width.",
    )
    periods = [1.0 / f for f, n in zip(frequencies.double().tolist(), kept, strict=True) for _ in range(n)]
    return {
        **{"rope_type": "longrope", "rope_theta": 1.0, "short_factor": periods, "long_factor": periods},
        **{
            "factor": 1.0,
            "original_max_position_embeddings": config.max_position_embeddings,
            "attention_factor": scaling,
        },
    }


def components(subject: Subject, index: int, pairs: Tensor, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of a block: the unitary matrices `(P, G, G)` whose columns are the principal components of each pair's keys, and
    the components' shares in the scores `(P, G)`."""
    config, (prefix, _) = subject.config, subject.blocks()[index]
    first, second = pairs

    def read(names: Sequence[str], heads: int) -> Tensor:
        weight, *bias = (subject.weights[name] for name in subject.have(prefix, *names))
        rows = with_bias(weight, bias).unflatten(0, (heads, -1))
        return torch.complex(rows[:, first], rows[:, second]).transpose(0, 1)  # (P, heads, C + 1)

    keys, queries = read(KEYS, config.num_key_value_heads), read(QUERIES, config.num_attention_heads)
    assert moment is not None
    inputs = moment.to(keys.dtype)
    energy, basis = torch.linalg.eigh(keys @ inputs @ keys.mH)
    energy, basis = energy.flip(-1), basis.flip(-1)
    asked = torch.einsum("phx,xy,phy->ph", queries, inputs, queries.conj()).real
    by_group = asked.unflatten(1, (config.num_key_value_heads, -1)).sum(-1)  # (P, G)
    shares = energy * torch.einsum("pgc,pg->pc", basis.abs().square(), by_group)
    return basis, shares / shares.sum()


def most(shares: Tensor, count: int) -> list[int]:
    """Of each pair, how many of its first components are among the `count` largest `(P, G)`."""
    # Non-increasing along a pair, so that what is chosen of it is always its beginning.
    falling = shares.cummin(-1).values
    chosen = falling.flatten().topk(count).indices // shares.shape[1]
    return chosen.bincount(minlength=shares.shape[0]).tolist()


@dataclass(frozen=True)
class Builder:
    """Makes a block's tensors of latent attention out of those with whole keys and values; see `to_mla`."""

    config: LlmArchConfig
    split: Split
    unitary: Tensor
    rank: int
    still: int
    rotated: int
    moment: Tensor | None

    @property
    def centred(self) -> bool:
        return self.config.norm_type == "layernorm"

    @property
    def names(self) -> list[str]:
        bias = ["bias"] if self.config.attention_bias else []
        norm = ["weight", *(["bias"] if self.config.norm_bias else [])]
        queries = ["q_proj.weight"]
        if bias:
            queries = ["q_a_proj.weight", "q_a_proj.bias", *(f"q_a_layernorm.{n}" for n in norm), "q_b_proj.weight"]
        keys = [f"kv_a_proj_with_mqa.{part}" for part in ["weight", *bias]]
        return [*queries, *keys, *(f"kv_a_layernorm.{n}" for n in norm), "kv_b_proj.weight"]

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        config, dtype = self.config, tensors[0].dtype
        if tensors[0].is_meta:
            return [torch.empty(shape, dtype=dtype, device="meta") for shape in self.shapes()]
        step = len(tensors) // 3
        queries, keys, values = (
            with_bias(t[0], t[1:]) for t in (tensors[:step], tensors[step : 2 * step], tensors[2 * step :])
        )
        turning, resting = self.keys(keys.unflatten(0, (config.num_key_value_heads, -1)))
        latent, up = self.latent(resting, values.unflatten(0, (config.num_key_value_heads, -1)))
        down = torch.cat((latent, turning))
        made: list[Tensor] = []
        if config.attention_bias:
            eye = torch.eye(len(queries), dtype=torch.float64)
            spread = self.queries(eye.unflatten(0, (config.num_attention_heads, -1)))
            queries, spread = self.with_zero_mean(queries, spread)
            made += [queries[:, :-1], queries[:, -1], *self.norm(len(queries)), spread]
            made += [down[:, :-1], down[:, -1]]
        else:
            made += [self.queries(queries.unflatten(0, (config.num_attention_heads, -1)))[:, :-1], down[:, :-1]]
        made += [*self.norm(len(latent)), up]
        return [tensor.to(dtype).contiguous() for tensor in made]

    def shapes(self) -> list[tuple[int, ...]]:
        config, extra = self.config, int(self.centred)
        heads, width = config.num_attention_heads, config.head_dim
        asked, rank = heads * (self.still + self.rotated), self.rank + extra
        norms = 1 + bool(config.norm_bias)
        down, up = (rank + self.rotated, config.hidden_size), (heads * (self.still + width), rank)
        if not config.attention_bias:
            return [(asked, config.hidden_size), down, *[(rank,)] * norms, up]
        inner = heads * width + extra
        first = [(inner, config.hidden_size), (inner,), *[(inner,)] * norms, (asked, inner)]
        return [*first, down, down[:1], *[(rank,)] * norms, up]

    def norm(self, width: int) -> list[Tensor]:
        """Weight, and bias, of a norm that is the identity under EPS."""
        weight = torch.full((width,), GAIN - self.config.norm_offset, dtype=torch.float64)
        return [weight, torch.zeros_like(weight)] if self.config.norm_bias else [weight]

    def with_zero_mean(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """For LayerNorm, which subtracts the mean: one channel more, which brings it to zero and which nobody reads."""
        if not self.centred:
            return down, up
        return torch.cat((down, -down.sum(0, keepdim=True))), torch.cat((up, torch.zeros_like(up[:, :1])), 1)

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """The pair, and the component, at each place of the rotated part, `(R / 2,)`."""
        kept = self.split.kept
        pair = torch.tensor([i for i, n in enumerate(kept) for _ in range(n)], dtype=torch.long)
        return pair, torch.tensor([c for n in kept for c in range(n)], dtype=torch.long)

    @property
    def losing(self) -> Tensor:
        """The pairs of which some component has no position any more."""
        groups = self.config.num_key_value_heads
        return torch.tensor([i for i, n in enumerate(self.split.kept) if n < groups], dtype=torch.long)

    def laid_out(self, z: Tensor) -> Tensor:
        """Complex rows `(…, R / 2, X)` as the channels of a rotated part, `(…, R, X)`."""
        if self.config.rope_interleaved:
            return torch.stack((z.real, z.imag), -2).flatten(-3, -2)
        return torch.cat((z.real, z.imag), -2)

    def at_rest(self, rows: Tensor, z: Tensor) -> Tensor:
        """What has no position, `(heads, N, X)`: channels that never had, and the real and imaginary parts of `z`."""
        z = z[:, self.losing] * self.split.scaling
        found = torch.cat((rows[:, self.split.rest], z.real, z.imag), 1)
        return torch.nn.functional.pad(found, (0, 0, 0, self.still - found.shape[1]))

    def complex_pairs(self, rows: Tensor) -> Tensor:
        first, second = self.split.pairs
        return torch.complex(rows[:, first], rows[:, second])  # (heads, P, X)

    def keys(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `(G, D, X)` as the shared rotated key `(R, X)`, and what has no position `(G, N, X)`."""
        parts = torch.einsum("pgc,gpx->pcx", self.unitary.conj(), self.complex_pairs(rows))
        turning = self.laid_out(parts[self.places])
        parts[self.places] = 0
        return turning, self.at_rest(rows, torch.einsum("pgc,pcx->gpx", self.unitary, parts))

    def queries(self, rows: Tensor) -> Tensor:
        """Queries `(H, D, X)` as `(H (N + R), X)`."""
        z = self.complex_pairs(rows)
        pair, component = self.places
        per_head = self.unitary.repeat_interleave(len(rows) // self.config.num_key_value_heads, 1)  # (P, H, G)
        factor = per_head[pair, :, component].T.conj()  # (H, R / 2)
        turning = self.laid_out(z[:, pair] * factor[..., None])
        return torch.cat((self.at_rest(rows, z), turning), 1).flatten(0, 1)

    def latent(self, resting: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that make the latent `(r, X)`, and those `(H (N + D), r)` that make keys and values of it."""
        config = self.config
        wanted = torch.cat((resting, values), 1)  # (G, N + D, X)
        still = resting.shape[1]
        used = (wanted != 0).any(-1)
        # A part that is not there must not take rank.
        used[:, still:] = True
        rows = wanted[used]
        balance = torch.ones(wanted.shape[:2], dtype=torch.float64)
        if resting.any():
            balance[:, :still] = (values.square().sum() / resting.square().sum()).sqrt()
        weights = balance[used][:, None]
        down, up = factors(rows * weights, self.rank, self.moment)
        spread = torch.zeros(*wanted.shape[:2], self.rank, dtype=torch.float64)
        spread[used] = up / weights
        spread = spread.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 0).flatten(0, 1)
        return self.with_zero_mean(down, spread)


def factors(rows: Tensor, rank: int, moment: Tensor | None) -> tuple[Tensor, Tensor]:
    """`(n, X)` as `up (n, r) @ down (r, X)`: exactly where the rank allows, else best in the sense of least squares for
    inputs of this second moment."""
    count = len(rows)
    if rank >= count:
        pad = torch.nn.functional.pad
        return pad(rows, (0, 0, 0, rank - count)), pad(torch.eye(count, dtype=rows.dtype), (0, rank - count))
    if moment is None:
        up, size, down = torch.linalg.svd(rows, full_matrices=False)
        return down[:rank], (up * size)[:, :rank]
    basis = torch.linalg.eigh(rows @ moment @ rows.T).eigenvectors[:, -rank:]
    return basis.T @ rows, basis
