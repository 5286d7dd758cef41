"""What differs between the supported releases of transformers."""

# First, before any name that another release of the host may lack.
from .host import FOUND, installed, release  # isort: skip

import inspect
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
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


# What `prepare_inputs_for_generation` calls the cache; `forward` takes both names. PEFT reads it there, to put a prompt
# or a prefix before the text once, and before 0.22 knows the former name alone: without one, at every token.
PREPARED_CACHE = "past_key_values" if release(installed("peft") or "99") < (0, 22) else CACHE


def prepared(inputs: dict[str, Any], first: bool = False) -> dict[str, Any]:
    """The arguments of a step of generation, with the cache under the name that PEFT looks for.

    Where generation is to use none, a step that reads the whole text again must not get the cache that a prefix was in
    at the `first`.
    """
    again = not first and inputs.get("use_cache") is False
    kept = {name: value for name, value in inputs.items() if name != CACHE or not again}
    return {PREPARED_CACHE if name == CACHE else name: value for name, value in kept.items()}


# Layer type -> the host's mask function, the table that `generate` uses for compiled caches.
MASKS = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
# The same for layers that see both sides.
BIDIRECTIONAL_MASKS = {
    "full_attention": create_bidirectional_mask,
    "sliding_attention": create_bidirectional_sliding_window_mask,
}

# Whether expert parallelism sends tokens to their experts; before, every device routed them all and ran its own.
EP_DISPATCHES = FOUND >= (5, 19)

# Experts implementation -> the host's function.
EXPERTS = ALL_EXPERTS_FUNCTIONS


# Operators of inductor, private names of torch: `(x, weight, bias, "none", [], "")`, a product by oneDNN, and a weight
# in oneDNN's layout for it, `(weight, rows)`.
ONEDNN: Any = torch.ops.mkldnn if torch.backends.mkldnn.is_available() else None
ONEDNN_LINEAR: Any = getattr(ONEDNN, "_linear_pointwise", None)
ONEDNN_PACK: Any = getattr(ONEDNN, "_reorder_linear_weight", None)


def _processor() -> str:
    """The processor's maker and abilities among other facts, as Linux tells them."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()


PROCESSOR = _processor()
# Whether fp32 products go to an MKL that does not use what the processor can do.
MKL_IS_SLOW = torch.backends.mkl.is_available() and ("AuthenticAMD" in PROCESSOR or "HygonGenuine" in PROCESSOR)
# Whether oneDNN multiplies bf16 in the tiles of Intel's AMX.
AMX = ONEDNN is not None and "amx_bf16" in PROCESSOR


def operators_are_watched() -> bool:
    """Whether something stands between a module and torch's kernels that an operator of inductor's would escape:
    autocast, a tracer, a mode (counting FLOPs, fake tensors), `torch.func`, forward-mode gradients."""
    return (
        torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )


def free_memory() -> int:
    """Bytes of main memory that nothing uses; 0 where the system does not say."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


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
