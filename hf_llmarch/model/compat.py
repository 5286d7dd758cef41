"""What differs between the supported releases of transformers and of PEFT."""

# This import comes first, because it refuses releases of transformers that lack names imported below.
from .host import FOUND, installed, release  # isort: skip

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    packed_sequence_mask_function,
)
from transformers.utils import is_tracing

# 5.24 renamed the cache from `past_key_values` to `cache`, as an argument and as an output's field.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


# The name of the cache in what `prepare_inputs_for_generation` returns; `forward` takes both names. PEFT looks for the
# cache there, to put a prompt or a prefix before the text in the first step only. Before 0.22 it knows only the former
# name of the cache; not finding it, it would put the prompt before every token.
PREPARED_CACHE = "past_key_values" if release(installed("peft") or "99") < (0, 22) else CACHE


def prepared(inputs: dict[str, Any], first: bool = False) -> dict[str, Any]:
    """The arguments of one step of generation, with the cache under the name that PEFT looks for.

    Generation without a cache (`use_cache=False`) reads the whole text at each step. If PEFT put a prefix before the
    text, it came as a cache in the first step; the later ones must not get it once more.

    Args:
        inputs: what transformers' `prepare_inputs_for_generation` returns.
        first: whether this is the first step.
    """
    again = not first and inputs.get("use_cache") is False
    kept = {name: value for name, value in inputs.items() if name != CACHE or not again}
    return {PREPARED_CACHE if name == CACHE else name: value for name, value in kept.items()}


# Layer type -> transformers' mask function, from the table that `generate` uses for compiled caches.
MASKS = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
# The same for layers without a causal mask.
BIDIRECTIONAL_MASKS = {
    "full_attention": create_bidirectional_mask,
    "sliding_attention": create_bidirectional_sliding_window_mask,
}

# Whether expert parallelism sends tokens to the devices of their experts. In older releases every device routes all
# tokens, and runs its own experts on them.
EP_DISPATCHES = FOUND >= (5, 19)

# Experts implementation -> transformers' function.
EXPERTS = ALL_EXPERTS_FUNCTIONS


def packed_overlay(position_ids: torch.Tensor | None) -> Callable[..., Any] | None:
    """A mask function that keeps packed documents apart, as flattening collators lay them out: one row, whose positions
    count up and begin again at 0. None for any other positions, which say where tokens stand and separate nothing.
    """
    if position_ids is None or position_ids.shape[0] != 1:
        return None
    starts, steps = position_ids == 0, position_ids.diff(dim=-1)
    packed = (starts[:, 1:] | (steps == 1)).all() & (starts[:, 1:] & (steps != 0)).any()
    # What positions hold cannot be asked in traced code: there the mask separates nothing where nothing is packed.
    if not is_tracing(position_ids) and not packed:
        return None
    return packed_sequence_mask_function(starts.cumsum(-1) * packed)


def code_files() -> list[Path]:
    """The source files that a saved folder needs to load with `trust_remote_code=True`."""
    model = Path(__file__).with_name("modeling_llmarch.py")
    return [model, *sorted({Path(file) for file in get_relative_import_files(str(model))})]
