"""How far a model sees: scaled rotations, longer tables of positions, and windows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_llmarch.model.configuration_llmarch import LlmArchConfig

from .operation import operation
from .subject import Change, Subject, each, fp32, refuse

RopeScaling = Literal["linear", "ntk", "dynamic", "yarn", "llama3", "longrope"]
# The keys that a kind of scaling takes beside its factor and the original length, which are derived here.
OPTIONAL: dict[RopeScaling, tuple[str, ...]] = {
    "linear": (),
    "ntk": (),
    "dynamic": (),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor", "attention_factor"),
}
# Those that a kind cannot do without, with the values that its authors published; None: there are none.
NEEDED: dict[RopeScaling, dict[str, float | None]] = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": None, "long_factor": None},
}
STATES_ORIGINAL: tuple[RopeScaling, ...] = ("yarn", "llama3", "longrope")


@operation
def extend_context(
    subject: Subject, factor: float, rope_type: RopeScaling = "yarn", parameters: dict[str, Any] | None = None
) -> Change:
    """RoPE for texts that are `factor` times as long. No tensor changes.

    `linear`: all angles divided by the factor (position interpolation, arXiv 2306.15595 section 2.3). `ntk`: a larger
    base, so that fast channels stay (NTK-aware scaling, arXiv 2309.00071 section 3.1). `dynamic`: the same by the
    length of the text at hand, so texts of the old length are read as before (there, section 3.3). `yarn`: by channel,
    with a correction of the softmax (there, section 3). `llama3`: by channel (arXiv 2407.21783, the released code).
    `longrope`: factors that were searched for (arXiv 2402.13753).

    `max_position_embeddings` grows by the factor, and the scaling notes the old length; for `dynamic` that field is the
    length from which on the base grows, and stays. Layers with a window see no longer distances, and keep theirs.

    Args:
        factor: new length / old length.
        rope_type: the kind of scaling.
        parameters: further keys of it, such as YaRN's `beta_fast`; LongRoPE needs `short_factor` and `long_factor`.

    Raises:
        SurgeryError: for a model without RoPE, or one that is scaled already; for a key that the kind does not have.
    """
    config = subject.config
    refuse(config.position_encoding != "rope", f"position_encoding={config.position_encoding!r} has no RoPE to scale.")
    refuse(factor < 1, f"factor={factor} must be 1 or more.")
    refuse(rope_type not in OPTIONAL, f"rope_type={rope_type!r} is not one of {', '.join(OPTIONAL)}.")
    given = {**NEEDED.get(rope_type, {}), **(parameters or {})}
    unknown = [name for name in given if name not in OPTIONAL[rope_type]]
    refuse(bool(unknown), f"rope_type={rope_type!r} has no {', '.join(unknown)}.")
    absent = [name for name, value in given.items() if value is None]
    refuse(bool(absent), f"rope_type={rope_type!r} needs {', '.join(absent)} in parameters.")
    length = config.max_position_embeddings
    scaled: dict[str, dict[str, Any]] = {}
    for kind, old in config.rope_by_layer_type.items():
        if kind != "full_attention":
            scaled[kind] = old
            continue
        refuse(old["rope_type"] != "default", f"rope_type={old['rope_type']!r} is a scaling already.")
        scaled[kind] = {**old, "rope_type": rope_type, "factor": float(factor), **given}
        if rope_type in STATES_ORIGINAL:
            scaled[kind]["original_max_position_embeddings"] = length
    refuse("full_attention" not in scaled, "layer_types: no layer has full_attention, so none sees longer distances.")
    new = length if rope_type == "dynamic" else int(length * factor)
    flat = scaled if len(scaled) > 1 else scaled["full_attention"]
    result = subject.changed(rope_parameters=flat, max_position_embeddings=new)
    if rope_type == "dynamic":
        return Change(result, True, f"Texts of up to {length} tokens are read as before.", "longer texts, for a while")
    return Change(result, False, f"{rope_type}: angles are smaller than in training.", "long texts, for a while")


@operation
def extend_positions(
    subject: Subject, max_position_embeddings: int, method: Literal["copy", "interpolate"] = "copy"
) -> Change:
    """A longer table of learned positions.

    `copy`: the table is repeated (Longformer, arXiv 2004.05150 section 5): texts of up to the old length are read as
    before. `interpolate`: the old rows are stretched over the new length, linearly between neighbours, so that order
    and ends stay.

    Raises:
        SurgeryError: for a model without learned positions, and for a shorter table.
    """
    config = subject.config
    refuse(
        config.position_encoding != "learned",
        f"position_encoding={config.position_encoding!r} has no table of positions.",
    )
    old, new = config.max_position_embeddings, max_position_embeddings
    refuse(new < old, f"max_position_embeddings={old} cannot be extended to {new}.")
    name = f"{subject.root}embed_positions.weight"
    how = partial(longer if method == "copy" else stretched, length=new, offset=config.position_offset)
    result = subject.changed([each(name, how)], max_position_embeddings=new)
    if method == "copy":
        return Change(result, True, f"Positions below {old} have their rows.", f"positions from {old} on")
    return Change(result, new == old, "Rows are stretched over the new length.", "positions, for a while")


def longer(table: Tensor, length: int, offset: int) -> Tensor:
    """Rows 0 to `length`, from the old ones over and over; the `offset` rows before position 0 stay."""
    rows = table[offset:]
    index = torch.arange(length, device=table.device) % len(rows)
    return torch.cat((table[:offset], rows[index]))


def stretched(table: Tensor, length: int, offset: int) -> Tensor:
    rows = fp32(lambda t: F.interpolate(t.T[None], size=length, mode="linear", align_corners=True)[0].T)(table[offset:])
    return torch.cat((table[:offset], rows))


@operation
def set_windows(subject: Subject, sliding_window: int, full_layers: Sequence[int] = ()) -> Change:
    """Windows in all layers but those named. No tensor changes; learned `attention_sinks` stay.

    Texts that are no longer than the window are read as before. Attention to a distance is lost, and with it what a
    model of full attention keeps in its first tokens (arXiv 2309.17453 section 3.1): leave layers full, or train.

    Args:
        sliding_window: keys that a query sees, itself included; in an encoder, on either side.
        full_layers: indices of the layers that stay full.
    """
    config = subject.config
    odd = [i for i in full_layers if not 0 <= i < config.num_hidden_layers]
    refuse(bool(odd), f"full_layers={odd} are not among the {config.num_hidden_layers} layers.")
    refuse("chunked_attention" in config.layer_types, "layer_types has chunked_attention, which is narrow already.")
    kinds = ["full_attention" if i in full_layers else "sliding_attention" for i in range(config.num_hidden_layers)]
    result = subject.changed(
        layer_types=kinds, sliding_window=sliding_window, **rope_for(config, list(dict.fromkeys(kinds)))
    )
    whole = sliding_window >= config.max_position_embeddings
    why = f"Texts of up to {sliding_window} tokens are read as before{'' if whole else '; longer ones lose sight'}."
    return Change(result, whole, why, "nothing" if whole else "long texts, for a while")


def rope_for(config: LlmArchConfig, kinds: Sequence[str]) -> dict[str, Any]:
    """RoPE parameters by layer type, with an entry for each kind in use."""
    known = config.rope_by_layer_type
    if len(known) < 2 and set(config.rope_parameters or {}).isdisjoint(known):
        return {}
    first = next(iter(known.values()))
    return {"rope_parameters": {kind: known.get(kind, first) for kind in kinds}}
