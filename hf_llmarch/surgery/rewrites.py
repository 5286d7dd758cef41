"""Exact rewrites: the same function in other words, for tools and families that know only those.

Shapes: `H` heads, `D` head width, `C` model width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .depth import LAST
from .operation import operation
from .subject import Change, Move, Subject, each, fp32, refuse

NORM = re.compile(r"(^|\.)(\w*norm(\.(pre|post|out))?)\.(weight|bias)$")
ROOM = {"self_attn": "attn_norm.pre", "mlp": "mlp_norm.pre"}
# What reads the normed stream in a block.
READERS = {
    "self_attn": re.compile(r"^self_attn\.(q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)\.weight$"),
    "mlp": re.compile(
        r"^mlp\.((experts\.\d+\.|shared_experts\.)?(gate_proj|up_proj)\.weight|experts\.(gate_up_proj|up_proj)"
        r"|gate\.weight|shared_expert_gate\.weight)$"
    ),
}


def biases_of(name: str) -> str:
    """The bias beside a weight; packed experts spell it otherwise."""
    return f"{name.removesuffix('weight')}bias" if name.endswith(".weight") else f"{name}_bias"


def readers(subject: Subject) -> list[tuple[str, list[str]]]:
    """The norms before branches and before the head, and the weights that read each."""
    config = subject.config
    found: list[tuple[str, list[str]]] = []
    for prefix, layer in subject.blocks():
        names = [name.removeprefix(prefix) for name in subject.weights if name.startswith(prefix)]
        by_branch = {branch: [prefix + n for n in names if which.match(n)] for branch, which in READERS.items()}
        if layer.parallel_block and layer.parallel_norms == 1:
            by_branch = {"self_attn": [*by_branch["self_attn"], *by_branch["mlp"]]}
        found += [(prefix + ROOM[branch], weights) for branch, weights in by_branch.items()]
    last = [n for n in ("transform.dense.weight", "lm_head.weight") if n in subject.weights][:1]
    if subject.has_head and last and not (config.tie_word_embeddings and not config.lm_head_transform):
        found.append((f"{subject.root}norm", last))
    return [(norm, weights) for norm, weights in found if f"{norm}.weight" in subject.weights]


@operation
def fold_norms(subject: Subject) -> Change:
    """The gains of the norms before projections go into these: W (g * n) = (W diag g) n, and W (n + b) = W n + W b.

    Afterwards those gains are 1, and biases 0: what SliceGPT (arXiv 2401.15024 section 3.2) and rotations of the stream
    need. The last norm stays as it is before a tied head, and with a bias before a head that has none.

    Raises:
        SurgeryError: a norm has a bias, and a projection behind it has none that could take it in.
    """
    offset = subject.config.norm_offset
    moves: list[Move] = []
    for norm, weights in readers(subject):
        gain, bias = f"{norm}.weight", f"{norm}.bias"
        if bias in subject.weights and "lm_head.weight" in weights and "lm_head.bias" not in subject.weights:
            continue
        moves.append(Move((gain,), (gain,), lambda g: [torch.full_like(g, 1.0 - offset)]))
        has_bias = bias in subject.weights
        if has_bias:
            moves.append(each(bias, torch.zeros_like))
        for name in weights:
            moves.append(Move((name, gain), (name,), lambda w, g: [fp32(lambda w, g: w * (g + offset))(w, g)]))
            if not has_bias:
                continue
            own = biases_of(name)
            refuse(
                own not in subject.weights,
                f"{bias} cannot go into {name}, beside which there is no bias: attention_bias, ffn_bias and, with "
                "experts, router_bias have to be set.",
            )
            moves.append(
                Move((own, name, bias), (own,), lambda own, w, b: [fp32(lambda o, w, b: o + w @ b)(own, w, b)])
            )
    refuse(not moves, f"norm_placement={subject.config.norm_placement!r}: no norm stands before a projection.")
    return Change(
        subject.changed(keep_read(subject, moves)), True, "A product of diagonal matrices and weights is one."
    )


def keep_read(subject: Subject, moves: Sequence[Move]) -> list[Move]:
    """The moves, and those that keep what is only read."""
    made = {name for move in moves for name in move.targets}
    seen = {name for move in moves for name in move.sources}
    return [*moves, *(each(name, torch.clone) for name in sorted(seen - made))]


@operation
def unfold_norms(subject: Subject) -> Change:
    """The way back from `fold_norms`: each norm's gain becomes the root mean square of its readers' columns, by which
    these are divided. So projections have columns of one size, and the gain says what a channel matters.

    Which gains were folded in cannot be known afterwards; these give the same function.
    """
    offset = subject.config.norm_offset

    def sizes(gain: Tensor, *weights: Tensor) -> Tensor:
        columns = torch.cat([w.float().flatten(0, -2) for w in weights]).square().mean(0).sqrt()
        return columns.clamp(min=torch.finfo(torch.float32).tiny).to(torch.promote_types(gain.dtype, torch.float32))

    moves: list[Move] = []
    for norm, weights in readers(subject):
        gain, bias = f"{norm}.weight", f"{norm}.bias"

        def new_gain(g: Tensor, *w: Tensor) -> list[Tensor]:
            return [((g + offset) * sizes(g, *w) - offset).to(g.dtype)]

        moves.append(Move((gain, *weights), (gain,), new_gain))
        if bias in subject.weights:
            moves.append(Move((bias, gain, *weights), (bias,), lambda b, g, *w: [(b * sizes(g, *w)).to(b.dtype)]))
        for name in weights:
            moves.append(Move((name, gain, *weights), (name,), lambda own, g, *w: [(own / sizes(g, *w)).to(own.dtype)]))
    return Change(subject.changed(keep_read(subject, moves)), True, "What the gain takes in the weights give.")


@operation
def set_norm_offset(subject: Subject, norm_offset: float) -> Change:
    """Norm weights that store gain minus another number: 1 for Gemma's way, 0 for the usual one. The gain stays.

    In fp32 it stays up to rounding; in bf16 a gain near 1 keeps more bits as a small number than as one near 1.
    """
    by = subject.config.norm_offset - norm_offset
    names = [n for n in subject.weights if NORM.search(n) and n.endswith("weight")]
    moves = [each(name, fp32(lambda w: w + by)) for name in names]
    return Change(subject.changed(moves, norm_offset=norm_offset), True, "The gain, offset + weight, is the same.")


@operation
def set_rope_layout(subject: Subject, interleaved: bool) -> Change:
    """Channels that are rotated together stand side by side (2i, 2i + 1), or half a rotated part apart (i, i + R/2).

    Queries and keys are permuted alike, and a dot product does not see the order of its terms. Norms on heads
    (`qk_norm`) have their weights permuted along; their statistics do not see the order either.

    Raises:
        SurgeryError: for a model without RoPE.
    """
    config = subject.config
    refuse(config.position_encoding != "rope", f"position_encoding={config.position_encoding!r} rotates nothing.")
    if interleaved == config.rope_interleaved:
        return Change(subject, True, "It is laid out so already.")
    moves: list[Move] = []
    for i, (prefix, layer) in enumerate(subject.blocks()):
        parameters = config.rope_by_layer_type[config.layer_types[i]]
        width = int(layer.rotary_head_dim * (parameters.get("partial_rotary_factor") or 1.0))
        order = torch.arange(width).view(2, -1).T if interleaved else torch.arange(width).view(-1, 2).T
        home = f"{prefix}self_attn."
        if layer.attention_kind == "mla":
            still, turned = layer.qk_nope_head_dim, layer.qk_rope_head_dim
            last = still + order.flatten()
            asked = torch.cat((torch.arange(still), last))
            down = torch.cat((torch.arange(layer.kv_lora_rank), layer.kv_lora_rank + order.flatten()))
            names = subject.have(home, "q_proj.weight", "q_b_proj.weight")
            moves += [each(n, partial(permuted, order=asked, width=still + turned)) for n in names]
            names = subject.have(home, "kv_a_proj_with_mqa.weight", "kv_a_proj_with_mqa.bias")
            moves += [each(n, partial(permuted, order=down, width=len(down))) for n in names]
            continue
        whole = torch.cat((order.flatten(), torch.arange(width, layer.head_dim)))
        names = [f"{part}.{kind}" for part in ("q_proj", "k_proj") for kind in ("weight", "bias")]
        moves += [each(n, partial(permuted, order=whole, width=layer.head_dim)) for n in subject.have(home, *names)]
        names = [f"{part}.{kind}" for part in ("q_norm", "k_norm") for kind in ("weight", "bias")]
        moves += [
            each(n, partial(permuted_norm, order=whole, width=layer.head_dim)) for n in subject.have(home, *names)
        ]
    return Change(subject.changed(moves, rope_interleaved=interleaved), True, "Queries and keys are permuted alike.")


def permuted(tensor: Tensor, order: Tensor, width: int) -> Tensor:
    """Rows of heads of `width` channels each, `(H D, …)`, in another order within each head."""
    return tensor.unflatten(0, (-1, width)).index_select(1, order.to(tensor.device)).flatten(0, 1)


def permuted_norm(tensor: Tensor, order: Tensor, width: int) -> Tensor:
    """A norm's weight `(D,)`, `(H, D)` or `(H D,)` in another order within each head."""
    return permuted(tensor.flatten(), order, width).view(tensor.shape)


@operation
def fold_scales(subject: Subject) -> Change:
    """The fixed factors of a model go into its weights: `embedding_scale` into the embedding, `residual_scale` into the
    last projection of each branch (or the norm behind it), `logit_scale` into the head.

    Where the head is tied to the embedding, the head's input takes the factors instead: the gain and the bias of the
    norm before it.

    Raises:
        SurgeryError: for a tied head without a norm before it.
    """
    config = subject.config
    tied = subject.has_head and config.tie_word_embeddings
    moves: dict[str, Move] = {}
    embedding, residual, logits = (
        float(f) for f in (config.embedding_scale, config.residual_scale, config.logit_scale)
    )
    if embedding != 1.0:
        # As the model does, the factor is first rounded to the weight's dtype.
        moves[f"{subject.root}embed_tokens.weight"] = each(
            f"{subject.root}embed_tokens.weight", lambda w: w * torch.tensor(embedding).to(w.dtype).item()
        )
    if residual != 1.0:
        behind = config.norm_placement in ("sandwich", "branch")
        for prefix, _ in subject.blocks():
            for name in (n for n in subject.weights if n.startswith(prefix)):
                tail = name.removeprefix(prefix.removesuffix("."))
                if behind and ("attn_norm.post." in name or "mlp_norm.post." in name):
                    offset = config.norm_offset if name.endswith("weight") else 0.0
                    moves[name] = each(name, partial(scaled, factor=residual, offset=offset))
                elif not behind and LAST.match(tail):
                    moves[name] = each(name, partial(scaled, factor=residual))
    head = "lm_head.bias"
    if subject.has_head and logits != 1.0 and head in subject.weights:
        moves[head] = each(head, partial(scaled, factor=logits))
    if subject.has_head and not tied and logits != 1.0:
        moves["lm_head.weight"] = each("lm_head.weight", partial(scaled, factor=logits))
    factor = logits / embedding
    if tied and factor != 1.0:
        norm = "transform.norm" if config.lm_head_transform else f"{subject.root}norm"
        refuse(
            f"{norm}.weight" not in subject.weights,
            "tie_word_embeddings=True without a norm before the head: untie it first.",
        )
        for name in subject.have(f"{norm}.", "weight", "bias"):
            offset = config.norm_offset if name.endswith("weight") else 0.0
            moves[name] = each(name, partial(scaled, factor=factor, offset=offset))
    ones = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1.0)
    if not subject.has_head:
        del ones["logit_scale"]
    return Change(subject.changed(moves.values(), **ones), True, "A factor goes into the weights that it multiplies.")


def scaled(tensor: Tensor, factor: float, offset: float = 0.0) -> Tensor:
    """A weight that stands for `offset + weight`, times a factor."""
    return fp32(lambda t: (t + offset) * factor - offset)(tensor)


WRITERS = re.compile(
    r"(^|\.)(embed_tokens|embed_types|embed_positions|embed_projection|self_attn\.o_proj|(mlp\.)?([\w.]*\.)?down_proj)"
    r"(\.(weight|bias)|_bias)?$"
)


@operation
def to_rmsnorm(subject: Subject) -> Change:
    """RMSNorm in place of LayerNorm, after the residual stream has been centred: exact (SliceGPT, arXiv 2401.15024
    section 3.1).

    LayerNorm sees its input less its mean over the channels. Whatever writes into the stream is made to write with mean
    zero, so the stream has mean zero everywhere, and the two norms are one function. Their biases stay.

    Raises:
        SurgeryError: unless all that is written comes from a linear map or a table: norms on the stream
            (`norm_placement`, `embedding_norm`), sinusoids; where a norm reads something else than the stream (MLA's
            latents, a head's transform); for a tied head, whose embedding must not change.
    """
    config = subject.config
    refuse(config.norm_type != "layernorm", f"norm_type={config.norm_type!r}: there is no LayerNorm to replace.")
    reasons: dict[str, bool] = {
        f"norm_placement={config.norm_placement!r} writes what has a gain": config.norm_placement != "pre",
        "embedding_norm=True writes what has a gain": config.embedding_norm,
        "position_encoding='sinusoidal' has no mean of zero": config.position_encoding == "sinusoidal",
        "attention_type='mla' norms latents": config.attention_kind == "mla",
        "lm_head_transform=True norms what is no stream": config.lm_head_transform,
        "classifier_norm=True norms what is no stream": config.classifier_norm,
        "tie_word_embeddings=True needs the embedding as it is: untie it first": subject.has_head
        and config.tie_word_embeddings,
    }
    for reason, holds in reasons.items():
        refuse(holds, f"{reason}.")
    narrow = config.embedding_size is not None
    moves = []
    for name, info in subject.weights.infos.items():
        match = WRITERS.search(name)
        if match is None or (narrow and "embed_" in name and "projection" not in name):
            continue
        by_row = ("embed_" in name and "projection" not in name) or len(info.shape) == 1 or name.endswith("_bias")
        moves.append(each(name, partial(centred, axis=-1 if by_row else -2)))
    switches = {
        **{"norm_type": "rmsnorm", "norm_bias": config.norm_bias},
        **({"qk_norm_type": config.qk_norm_type or "layernorm"} if config.qk_norm != "none" else {}),
    }
    return Change(
        subject.changed(moves, **switches), True, "The stream has mean zero, where both norms are one function."
    )


def centred(tensor: Tensor, axis: int) -> Tensor:
    return fp32(lambda t: t - t.mean(axis, keepdim=True))(tensor)


@operation
def untie(subject: Subject) -> Change:
    """An output head of its own, which begins as a copy of the embedding: exact."""
    config = subject.config
    refuse(not (subject.has_head and config.tie_word_embeddings), "tie_word_embeddings is False: the head is its own.")
    name = f"{subject.root}embed_tokens.weight"
    copy = Move((name,), (name, "lm_head.weight"), lambda w: [w, w.clone()])
    return Change(subject.changed([copy], tie_word_embeddings=False), True, "The head is a copy of the embedding.")


@operation
def tie(subject: Subject) -> Change:
    """One matrix for embedding and head: exact where they are equal, else their mean."""
    config = subject.config
    refuse(not subject.has_head or config.tie_word_embeddings, "tie_word_embeddings is True, or there is no head.")
    name, head = f"{subject.root}embed_tokens.weight", "lm_head.weight"
    same = bool(torch.equal(subject.weights[name], subject.weights[head]))
    mean = Move((name, head), (name,), lambda a, b: [a if same else fp32(lambda a, b: (a + b) / 2)(a, b)])
    result = subject.changed([mean], tie_word_embeddings=True)
    if same:
        return Change(result, True, "Head and embedding were equal.")
    return Change(result, False, "Head and embedding are their mean.", "embedding and head")
