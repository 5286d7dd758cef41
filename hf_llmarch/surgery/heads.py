"""Attention heads: how many there are, and how many share a key and a value.

Shapes: `H` query heads, `G` key/value heads, `D` head width, `C` model width. Query head h reads key/value head
h // (H / G).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .operation import operation
from .subject import Change, Move, Subject, each, fp32, refuse

KEYS = ("self_attn.k_proj.weight", "self_attn.k_proj.bias")
VALUES = ("self_attn.v_proj.weight", "self_attn.v_proj.bias")
QUERIES = ("self_attn.q_proj.weight", "self_attn.q_proj.bias")
# The qk_norms whose weights belong to heads: under `head` one weight serves them all.
OF_HEADS = ("heads", "projection")
NORMS = {
    "q": ("self_attn.q_norm.weight", "self_attn.q_norm.bias"),
    "k": ("self_attn.k_norm.weight", "self_attn.k_norm.bias"),
}


def refuse_latent(config: LlmArchConfig) -> None:
    refuse(
        any(layer.attention_kind == "mla" for layer in config.layer_configs()),
        "attention_type='mla' has one latent for all heads: there are no key/value heads to change.",
    )


def repeated(tensor: Tensor, old: int, new: int) -> Tensor:
    """`(G D, …)` with each head `new / old` times in a row."""
    return tensor.unflatten(0, (old, -1)).repeat_interleave(new // old, 0).flatten(0, 1)


def averaged(tensor: Tensor, old: int, new: int) -> Tensor:
    """`(G D, …)` with the mean of each `old / new` neighbouring heads."""
    return fp32(lambda t: t.unflatten(0, (new, old // new, -1)).mean(1).flatten(0, 1))(tensor)


@operation
def to_gqa(subject: Subject, num_key_value_heads: int, method: Literal["mean", "least_squares"] = "mean") -> Change:
    """Another number of key/value heads, one that is a multiple of the old number or divides it.

    More of them, up to MHA: each is repeated. The new query groups lie within the old ones, so every query reads the
    key and value that it read before: exact. With `qk_norm='projection'` the norm's statistics run over all heads,
    where repeating each equally often changes neither mean nor mean square.

    Fewer of them, down to MQA: a head becomes the `mean` of a group's heads (Ainslie et al., arXiv 2305.13245 section
    2.1), or the head that serves the group best in the sense of `least_squares`: values v_h of a group are written as
    P_h v' with the D directions that hold most of their energy on the sample, and P_h goes into the output projection.
    Keys are rotated after their projection, which only complex factors a_h of a channel pair pass through: k_h = a_h k'
    with the first principal component over the group, and the conjugate of a_h goes into the query. Channels that are
    not rotated take the real form.

    Args:
        num_key_value_heads: the new number.
        method: for fewer heads.

    Raises:
        SurgeryError: for MLA, for a number that does not fit, and for `least_squares` with a norm or a clamp behind
            the projections, which no factor passes through.
    """
    config, count = subject.config, num_key_value_heads
    refuse_latent(config)
    for _, layer in subject.blocks():
        old = layer.num_key_value_heads
        refuse(
            count < 1 or layer.num_attention_heads % count != 0 or (count % old != 0 and old % count != 0),
            f"num_key_value_heads={old} cannot become {count}: one must be a multiple of the other, and the new one "
            f"divide num_attention_heads={layer.num_attention_heads}.",
        )
    fewer = any(count < layer.num_key_value_heads for _, layer in subject.blocks())
    if fewer and method == "least_squares":
        moves = best_heads(subject, count)
    else:
        moves = []
        for prefix, layer in subject.blocks():
            old = layer.num_key_value_heads
            how = partial(repeated if count >= old else averaged, old=old, new=count)
            names = [*KEYS, *VALUES, *(NORMS["k"] if layer.qk_norm in OF_HEADS else ())]
            moves += [each(name, how) for name in subject.have(prefix, *names)]
    result = subject.changed(moves, num_key_value_heads=count, attention_type=None)
    if not fewer:
        return Change(result, True, "Every query reads a copy of the key and the value that it read before.")
    what = "the mean of the heads it replaces" if method == "mean" else "the least-squares fit to the heads it replaces"
    return Change(
        result, False, f"A key/value head is {what}.", "all weights, about 5 % of the pretraining (2305.13245)"
    )


@torch.no_grad()
def second_moments(subject: Subject, module: str) -> list[Tensor]:
    """Of each block, the mean of x x^T over the sample's tokens, `(C + 1, C + 1)` in fp64, where x is the input of
    `module` with a 1 behind it for the bias."""
    model = subject.build()
    found: dict[str, Tensor] = {}

    def see(name: str, part: nn.Module, args: tuple[Tensor, ...]) -> None:
        x = args[0].detach().flatten(0, -2).double()
        x = torch.cat((x, torch.ones_like(x[:, :1])), -1)
        found[name] = found.get(name, 0) + x.T @ x / len(x)

    names = [f"{prefix}{module}" for prefix, _ in subject.blocks()]
    handles = [model.get_submodule(name).register_forward_pre_hook(partial(see, name)) for name in names]
    model(subject.sample, use_cache=False)
    for handle in handles:
        handle.remove()
    return [found[name] for name in names]


def with_bias(weight: Tensor, bias: Sequence[Tensor]) -> Tensor:
    """`(O, I + 1)`, the bias, or zeros, as the last column; fp64."""
    last = bias[0].double()[:, None] if bias else torch.zeros_like(weight[:, :1], dtype=torch.float64)
    return torch.cat((weight.double(), last), -1)


def best_heads(subject: Subject, count: int) -> list[Move]:
    config = subject.config
    refuse(
        any(layer.qk_norm != "none" or layer.clip_qkv is not None for _, layer in subject.blocks()),
        f"method='least_squares' with qk_norm={config.qk_norm!r}, clip_qkv={config.clip_qkv!r}: the factors that it "
        "puts into queries and outputs do not pass through these. Use method='mean'.",
    )
    moves = []
    moments = second_moments(subject, "self_attn.k_proj")
    for i, ((prefix, layer), moment) in enumerate(zip(subject.blocks(), moments, strict=True)):
        keys, values = subject.have(prefix, *KEYS), subject.have(prefix, *VALUES)
        queries, out = subject.have(prefix, *QUERIES), f"{prefix}self_attn.o_proj.weight"
        sizes: dict[str, Any] = {
            "count": count,
            "old": layer.num_key_value_heads,
            "width": layer.head_dim,
            "moment": moment,
        }
        rotated = rotated_pairs(config, layer, i)
        moves.append(Move((*queries, *keys), (*queries, *keys), partial(best_keys, rotated=rotated, **sizes)))
        moves.append(Move((*values, out), (*values, out), partial(best_values, **sizes)))
    return moves


def rotated_pairs(config: LlmArchConfig, layer: LlmArchConfig, index: int) -> Tensor | None:
    """The channel pairs of a head that RoPE rotates, `(2, R / 2)`; None: it rotates none."""
    parameters = config.rope_by_layer_type.get(config.layer_types[index])
    if parameters is None or index in (config.nope_layers or ()):
        return None
    width = int(layer.rotary_head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    channels = torch.arange(width)
    return channels.view(-1, 2).T if config.rope_interleaved else channels.view(2, -1)


def best_values(*tensors: Tensor, count: int, old: int, width: int, moment: Tensor) -> list[Tensor]:
    """Value weight (and bias) and the output weight for fewer heads; see `to_gqa`."""
    *value, out = tensors
    group = old // count
    per_head = out.shape[1] // width // old  # query heads of one old key/value head
    if out.is_meta:
        return [*(averaged(t, old, count) for t in value), out]
    whole = with_bias(value[0], value[1:]).view(count, group * width, -1)
    energy = whole @ moment @ whole.mT  # (count, group D, group D)
    basis = torch.linalg.eigh(energy).eigenvectors[..., -width:]  # the directions of most energy, (count, group D, D)
    fitted = (basis.mT @ whole).flatten(0, 1)
    read = out.double().view(-1, count, group, per_head, width)  # (C, count, group, per head, D)
    folded = torch.einsum("cngpd,ngde->cngpe", read, basis.view(count, group, width, width)).flatten(1)
    made = [fitted[:, :-1], fitted[:, -1], folded] if len(value) > 1 else [fitted[:, :-1], folded]
    return [new.to(old.dtype).contiguous() for new, old in zip(made, tensors, strict=True)]


def best_keys(
    *tensors: Tensor, count: int, old: int, width: int, moment: Tensor, rotated: Tensor | None
) -> list[Tensor]:
    """Query and key weight (and biases) for fewer heads; see `to_gqa`."""
    half = len(tensors) // 2
    query, key = tensors[:half], tensors[half:]
    group = old // count
    if key[0].is_meta:
        return [*query, *(averaged(t, old, count) for t in key)]
    whole = with_bias(key[0], key[1:]).unflatten(0, (count, group, width))  # (count, group, D, C + 1)
    asked = with_bias(query[0], query[1:]).unflatten(0, (count, group, -1, width))  # (count, group, per head, D, C + 1)
    fitted = torch.empty_like(whole[:, 0])
    paired = torch.zeros(width, dtype=torch.bool)
    if rotated is not None:
        paired[rotated.flatten()] = True
        first, second = rotated
        z = torch.complex(whole[:, :, first], whole[:, :, second]).transpose(1, 2)  # (count, R/2, group, C + 1)
        q = torch.complex(asked[..., first, :], asked[..., second, :])
        cross = z @ moment.to(z.dtype) @ z.mH  # (count, R/2, group, group)
        factor = torch.linalg.eigh(cross).eigenvectors[..., -1]  # k_h = factor_h k'
        k = torch.einsum("nrg,nrgc->nrc", factor.conj(), z)
        fitted[:, first], fitted[:, second] = k.real, k.imag
        q = q * factor.transpose(1, 2).conj()[:, :, None, :, None]
        asked[..., first, :], asked[..., second, :] = q.real, q.imag
    rest = (~paired).nonzero()[:, 0]
    if len(rest):
        # All channels without a rotation together, as values are.
        still = whole[:, :, rest].flatten(1, 2)
        basis = torch.linalg.eigh(still @ moment @ still.mT).eigenvectors[..., -len(rest) :]
        fitted[:, rest] = basis.mT @ still
        parts = basis.unflatten(1, (group, len(rest)))  # (count, group, rest, rest')
        asked[..., rest, :] = torch.einsum("ngpdc,ngde->ngpec", asked[..., rest, :], parts)
    made = [asked.flatten(0, 3), fitted.flatten(0, 1)]
    parts = [t[:, :-1] if part == 0 else t[:, -1] for t in made for part in range(half)]
    return [new.to(old.dtype).contiguous() for new, old in zip(parts, tensors, strict=True)]


@operation
def to_mha(subject: Subject) -> Change:
    """One key/value head for each query head: exact. See `to_gqa`."""
    return to_gqa.function(subject, subject.config.num_attention_heads)


@operation
def to_mqa(subject: Subject, method: Literal["mean", "least_squares"] = "mean") -> Change:
    """One key/value head for all query heads. See `to_gqa`."""
    return to_gqa.function(subject, 1, method)


# -- other heads than before -------------------------------------------------------------------------------------------


def picked_groups(tensor: Tensor, groups: int, index: Tensor, dim: int = 0, shares: Tensor | None = None) -> Tensor:
    """Blocks of a tensor along one axis, `groups` of them, by index; each times a number where `shares` are given."""
    axis = dim % tensor.dim()
    blocks = tensor.unflatten(axis, (groups, -1)).index_select(axis, index.to(tensor.device))
    if shares is not None:
        shape = [1] * blocks.dim()
        shape[axis] = -1
        blocks = blocks * shares.to(tensor).view(shape)
    return blocks.flatten(axis, axis + 1)


def other_groups(
    subject: Subject, index: Callable[[Subject, str, LlmArchConfig], tuple[Tensor, Tensor]], groups: int
) -> Subject:
    """With `groups` key/value heads, each with its query heads, that are copies of old ones.

    Args:
        index: of a block, which old group each new one is, and what its part of the output is multiplied with.
    """
    config = subject.config
    refuse(
        config.position_encoding == "alibi",
        "position_encoding='alibi' gives each head a slope by its place among all heads: their number cannot change.",
    )
    moves: list[Move] = []
    for prefix, layer in subject.blocks():
        old = layer.num_key_value_heads
        chosen, shares = index(subject, prefix, layer)
        norms = [*NORMS["q"], *NORMS["k"]] if layer.qk_norm in OF_HEADS else []
        names = [*QUERIES, *KEYS, *VALUES, *norms, "self_attn.sinks"]
        moves += [each(n, partial(picked_groups, groups=old, index=chosen)) for n in subject.have(prefix, *names)]
        out = f"{prefix}self_attn.o_proj.weight"
        moves.append(each(out, partial(picked_groups, groups=old, index=chosen, dim=1, shares=shares)))
    for name in subject.weights:
        if "relative_attention_bias" in name:
            refuse(
                len({tuple(index(subject, *block)[0].tolist()) for block in subject.blocks()}) > 1,
                "position_encoding='relative_bias' with heads that are other ones in each layer: the layers share one "
                "table of biases. Name the heads.",
            )
            chosen, _ = index(subject, *subject.blocks()[0])
            moves.append(each(name, partial(picked_groups, groups=config.num_key_value_heads, index=chosen, dim=1)))
    queries = config.num_attention_heads // config.num_key_value_heads * groups
    return subject.changed(moves, num_attention_heads=queries, num_key_value_heads=groups, attention_type=None)


@operation
def widen_heads(subject: Subject, num_key_value_heads: int) -> Change:
    """More key/value heads, each with query heads of its own: exact (Net2Wider, arXiv 1511.05641 section 2.2).

    A new group is a copy of an old one, and a group that is there n times has its columns of the output projection
    divided by n: the sum over the copies is what it was.

    Args:
        num_key_value_heads: the new number; the query heads grow in the same proportion.

    Raises:
        SurgeryError: for MLA, ALiBi, a smaller number; for `qk_norm='projection'`, whose statistics run over all heads.
    """
    config, new = subject.config, num_key_value_heads
    refuse_latent(config)
    old = config.num_key_value_heads
    refuse(new < old, f"num_key_value_heads={old} cannot be widened to {new}.")
    refuse(
        any(layer.qk_norm == "projection" for _, layer in subject.blocks()) and bool(new % old),
        "qk_norm='projection' has its statistics over all heads: they stay only when each is repeated equally often, "
        f"so num_key_value_heads must be a multiple of {old}.",
    )
    index = torch.arange(new) % old
    shares = 1.0 / index.bincount()[index].float()
    result = other_groups(subject, lambda *_: (index, shares), new)
    why = "A head that is there n times has its part of the output divided by n."
    return Change(result, True, why, "copies are alike until noise or training tells them apart")


@operation
def prune_heads(subject: Subject, num_key_value_heads: int, heads: Sequence[int] | None = None) -> Change:
    """Fewer key/value heads, each dropped together with the query heads that read it.

    Which ones: those named, in every layer; else in each layer those whose part of the output, the product of the norms
    of its value rows and output columns, is smallest (magnitude pruning, as in arXiv 1910.06360 section 3).

    Args:
        num_key_value_heads: how many stay.
        heads: the key/value heads that stay, in every layer.

    Raises:
        SurgeryError: for MLA, for ALiBi, and for a number that does not fit.
    """
    config, count = subject.config, num_key_value_heads
    refuse_latent(config)
    old = config.num_key_value_heads
    refuse(not 0 < count <= old, f"num_key_value_heads={old} cannot be pruned to {count}.")
    refuse(
        heads is not None and (len(set(heads)) != count or not set(heads) <= set(range(old))),
        f"heads={heads} are not {count} different ones of the {old} key/value heads.",
    )

    def index(subject: Subject, prefix: str, layer: LlmArchConfig) -> tuple[Tensor, Tensor]:
        if heads is not None:
            return torch.tensor(sorted(heads)), torch.ones(count)
        value = subject.weights[f"{prefix}self_attn.v_proj.weight"].double().unflatten(0, (old, -1))
        out = subject.weights[f"{prefix}self_attn.o_proj.weight"].double().unflatten(1, (old, -1))
        energy = value.square().sum((1, 2)) * out.square().sum((0, 2))
        return energy.topk(count).indices.sort().values, torch.ones(count)

    result = other_groups(subject, index, count)
    why = "The heads with the smallest weights are gone." if heads is None else f"Only heads {sorted(heads)} are left."
    return Change(result, count == old, why, "all weights, for a short while")
