"""Width: of the feed-forward and of the residual stream.

Shapes: `I` inner width of a feed-forward, `C` width of the residual stream.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import Tensor

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .operation import operation
from .subject import Change, Move, Subject, each, fp32, refuse

# -- the feed-forward --------------------------------------------------------------------------------------------------

# The feed-forwards of a block: where they stand, and by which switch they are as wide as they are.
DENSE, ROUTED, SHARED = "mlp.", "mlp.experts.", "mlp.shared_experts."
INTO = ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias")
OUT = "down_proj.weight"
PACKED_INTO = ("gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias")
PACKED_OUT = "down_proj"


def picked(tensor: Tensor, index: Tensor, dim: int, halves: int = 1, shares: Tensor | None = None) -> Tensor:
    """Channels along one axis, by index, or by an index for each expert `(E, I)`; `halves` of them stand one behind the
    other (gate and up). Each is multiplied with its share where these are given."""
    axis = dim % tensor.dim()
    index = index.to(tensor.device)
    parts = []
    for part in tensor.chunk(halves, axis):
        if index.dim() == 1:
            chosen = part.index_select(axis, index)
        else:
            shape = [len(index)] + [1] * (part.dim() - 1)
            shape[axis] = index.shape[1]
            chosen = part.gather(
                axis, index.view(shape).expand(*[index.shape[1] if a == axis else n for a, n in enumerate(part.shape)])
            )
        if shares is not None:
            shape = [1] * chosen.dim()
            shape[axis] = -1
            chosen = fp32(lambda t, shape=shape: t * shares.to(t).view(shape))(chosen)
        parts.append(chosen)
    return torch.cat(parts, axis)


def inner_moves(subject: Subject, home: str, index: Tensor, shares: Tensor | None) -> list[Move]:
    """The moves of one feed-forward (or of one layer's packed experts) to the inner channels `index`."""
    moves = [each(n, partial(picked, index=index, dim=0)) for n in subject.have(home, *INTO)]
    moves += [each(n, partial(picked, index=index, dim=1, shares=shares)) for n in subject.have(home, OUT)]
    for name in subject.have(home, *PACKED_INTO):
        halves = 2 if "gate_up" in name else 1
        moves.append(each(name, partial(picked, index=index, dim=1, halves=halves)))
    moves += [each(n, partial(picked, index=index, dim=2, shares=shares)) for n in subject.have(home, PACKED_OUT)]
    return moves


def homes(subject: Subject, prefix: str) -> list[str]:
    """Where the feed-forwards of a block stand that are as wide as `intermediate_size`, or as `moe_intermediate_size`
    in a sparse layer."""
    if subject.have(prefix, f"{DENSE}{OUT}"):
        return [f"{prefix}{DENSE}"]
    routed = f"{prefix}{ROUTED}"
    if subject.have(routed, PACKED_OUT):
        return [routed]
    number = re.compile(rf"^{re.escape(routed)}(\d+)\.{re.escape(OUT)}$")
    return [f"{routed}{match[1]}." for name in subject.weights if (match := number.match(name))]


def inner_width(layer: LlmArchConfig, is_sparse: bool) -> int:
    return (layer.moe_intermediate_size or layer.intermediate_size) if is_sparse else layer.intermediate_size


def sparse(config: LlmArchConfig, index: int) -> bool:
    return config.mlp_layer_types is not None and config.mlp_layer_types[index] == "sparse"


def chosen_layers(subject: Subject, experts: bool) -> list[tuple[str, LlmArchConfig]]:
    """The blocks with dense feed-forwards, or those with experts."""
    found = [block for i, block in enumerate(subject.blocks()) if sparse(subject.config, i) == experts]
    kind = "sparse" if experts else "dense"
    refuse(not found, f"mlp_layer_types={subject.config.mlp_layer_types}: there is no {kind} layer.")
    return found


def widths_after(subject: Subject, experts: bool, new: int) -> dict[str, int | None]:
    """The switches of a new inner width, of dense layers or of experts; the others' widths stay."""
    config = subject.config
    if not experts:
        # Experts without a width of their own take it from the dense ones.
        kept = {"moe_intermediate_size": config.moe_intermediate_size or config.intermediate_size}
        return {"intermediate_size": new, **(kept if config.num_experts is not None else {})}
    shared = config.shared_width
    keep = {"num_shared_experts": 0, "shared_expert_intermediate_size": shared} if shared else {}
    return {"moe_intermediate_size": new, **keep}


@operation
def widen_ffn(subject: Subject, intermediate_size: int, experts: bool = False) -> Change:
    """A wider feed-forward: exact (Net2Wider, arXiv 1511.05641 section 2.2).

    New inner channels are copies of old ones, and a channel that is there n times has its column of the last projection
    divided by n. Activations act channel by channel, so the copies agree. Up to twice the width n is 1 or 2, and no
    bit of the weights is lost.

    Args:
        intermediate_size: the new inner width.
        experts: of the routed experts, not of the dense layers.

    Raises:
        SurgeryError: for a smaller width, or where there is no such layer.
    """
    moves: list[Move] = []
    for prefix, layer in chosen_layers(subject, experts):
        old = inner_width(layer, experts)
        refuse(intermediate_size < old, f"The inner width {old} cannot be widened to {intermediate_size}.")
        index = torch.arange(intermediate_size) % old
        shares = 1.0 / index.bincount()[index].float()
        for home in homes(subject, prefix):
            moves += inner_moves(subject, home, index, shares)
    result = subject.changed(moves, **widths_after(subject, experts, intermediate_size))
    why = "A channel that is there n times has its column of the last projection divided by n."
    return Change(result, True, why, "copies are alike until noise or training tells them apart")


@operation
def prune_ffn(subject: Subject, intermediate_size: int, experts: bool = False) -> Change:
    """A narrower feed-forward: in each layer, and each expert, the inner channels with the largest weights stay.

    A channel's importance is the product of the norms of its rows and of its column (magnitude pruning of whole
    channels, as in arXiv 1608.08710 section 3.1, for both sides of the channel).

    Args:
        intermediate_size: the new inner width.
        experts: of the routed experts, not of the dense layers.
    """
    moves: list[Move] = []
    for prefix, layer in chosen_layers(subject, experts):
        old = inner_width(layer, experts)
        refuse(not 0 < intermediate_size <= old, f"The inner width {old} cannot be pruned to {intermediate_size}.")
        for home in homes(subject, prefix):
            moves.append(pruning(subject, home, intermediate_size))
    result = subject.changed(moves, **widths_after(subject, experts, intermediate_size))
    why = "The inner channels with the smallest weights are gone."
    return Change(result, False, why, "all weights, for a short while")


def pruning(subject: Subject, home: str, count: int) -> Move:
    """The tensors of one feed-forward, of which the channels are chosen when they are read."""
    into, out = subject.have(home, *INTO, *PACKED_INTO), subject.have(home, OUT, PACKED_OUT)
    names = (*into, *out)
    axis = 1 if f"{home}{PACKED_OUT}" in names else 0

    def how(*tensors: Tensor) -> list[Tensor]:
        by_name = dict(zip(names, tensors, strict=True))
        last = tensors[-1].double()
        importance = last.square().sum(-2)  # (I,) or (E, I)
        for name in into:
            if not name.endswith("bias"):
                for half in by_name[name].double().chunk(2 if "gate_up" in name else 1, axis):
                    importance = importance * half.square().sum(-1)
        index = importance.topk(count, dim=-1).indices.sort(-1).values
        if tensors[0].is_meta:
            index = torch.empty_like(index, device="meta")
        made = [picked(by_name[n], index, axis, 2 if "gate_up" in n else 1) for n in into]
        return [*made, picked(tensors[-1], index, axis + 1)]

    return Move(names, names, how)


# -- the residual stream -----------------------------------------------------------------------------------------------

# What of a model has the residual stream's channels along its first axis (what it writes), and along its last (reads).
WRITES = re.compile(
    r"(^|\.)(embed_tokens\.weight|embed_types\.weight|embed_positions\.weight|embed_projection\.(weight|bias)"
    r"|self_attn\.o_proj\.(weight|bias)|down_proj\.(weight|bias)|down_proj|down_proj_bias)$"
)
READS = re.compile(
    r"(^|\.)(self_attn\.(q_proj|k_proj|v_proj|q_a_proj|kv_a_proj_with_mqa)\.weight|(gate_proj|up_proj)\.weight"
    r"|gate_up_proj|up_proj|mlp\.gate\.weight|shared_expert_gate\.weight|lm_head\.weight|transform\.dense\.weight"
    r"|pooler\.dense\.weight)$"
)
NORMS = re.compile(r"(^|\.)((attn|mlp)_norm\.(pre|post|out)|model\.norm|^norm|embed_norm)\.(weight|bias)$")


@operation
def widen_hidden(subject: Subject, factor: int) -> Change:
    """A residual stream that is a whole number of times as wide: exact.

    Every channel is there `factor` times, and what reads the stream is divided by `factor`. Mean, variance and mean
    square over all channels are then what they were, so RMSNorm and LayerNorm give the same numbers; with any width
    that is no multiple they would not, because a channel that is there more often than another weighs more.

    What reads the stream for the logits is the embedding itself where it is tied: then the last norm's gain (and bias)
    is divided instead. Heads keep their number and width.

    Raises:
        SurgeryError: for sinusoidal positions, which are computed for the width; for a model with a task's head; for a
            tied head without a norm before it.
    """
    config, root = subject.config, subject.root
    refuse(factor < 1, f"factor={factor} must be 1 or more.")
    refuse(config.position_encoding == "sinusoidal", "position_encoding='sinusoidal' is computed for one width.")
    refuse(
        not (subject.has_head or root == ""),
        f"{subject.kind.__name__} has a task's head: widen the base model, and put a new head on it.",
    )
    tied = subject.has_head and config.tie_word_embeddings and not config.embedding_size
    before_head = f"{root}norm." if not config.lm_head_transform else "transform.norm."
    refuse(
        tied and f"{before_head}weight" not in subject.weights,
        "tie_word_embeddings=True without a norm before the head: untie it first.",
    )
    # A factorised embedding is not the stream, nor is what follows it up to its projection.
    narrow = config.embedding_size is not None
    moves: list[Move] = []
    for name in subject.weights:
        if narrow and re.search(r"(^|\.)(embed_tokens|embed_types|embed_positions|embed_norm)\.", name):
            continue
        if (
            narrow
            and config.lm_head_transform
            and name.startswith(("transform.norm.", "transform.dense.bias", "lm_head."))
        ):
            continue
        divisor = float(factor) if tied and name.startswith(before_head) else 1.0
        offset = config.norm_offset if name.endswith("weight") else 0.0
        axes: dict[int, float] = {}
        if (
            NORMS.search(name)
            or name == f"{root}norm.weight"
            or name == f"{root}norm.bias"
            or name.startswith("transform.norm.")
        ):
            moves.append(each(name, partial(gain, factor=factor, divisor=divisor, offset=offset)))
            continue
        if WRITES.search(name):
            # Looked-up rows have the channels last; packed experts' weights have their experts first.
            axes[-1 if ("embed_" in name and "projection" not in name) or name.endswith("bias") else -2] = 1.0
        if READS.search(name):
            axes[-1] = float(factor)
        if (name.startswith("transform.dense.") and not narrow) or name.startswith(f"{root}pooler.dense."):
            axes[0] = 1.0
        if axes:
            moves.append(each(name, partial(repeated, factor=factor, axes=axes)))
    switches = {"hidden_size": config.hidden_size * factor, "head_dim": config.head_dim}
    result = subject.changed(moves, **switches)
    why = "Each channel is there equally often, so every norm has the statistics it had, and what reads it is divided."
    return Change(result, True, why, "copies are alike until noise or training tells them apart")


def repeated(tensor: Tensor, factor: int, axes: dict[int, float]) -> Tensor:
    """With the whole of these axes `factor` times, divided by the axis's number."""
    for axis, divisor in axes.items():
        tensor = torch.cat([tensor] * factor, axis)
        if divisor != 1.0:
            tensor = fp32(lambda t, divisor=divisor: t / divisor)(tensor)
    return tensor


def gain(tensor: Tensor, factor: int, divisor: float, offset: float) -> Tensor:
    """A norm's weight or bias, `factor` times, with what it stands for divided."""
    tensor = torch.cat([tensor] * factor)
    return tensor if divisor == 1.0 else fp32(lambda t: (t + offset) / divisor - offset)(tensor)
