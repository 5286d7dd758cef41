"""A certificate that a converted model is the original: the same numbers out, and the same bytes back.

Both models run in float32 on the same prompts, some of them padded, each with the attention backend that it picks by
itself, as it will for a user; differences are taken in float64. Bytes are compared by exporting in memory.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from hf_llmarch.model.configuration_llmarch import AUTO_MAP, LlmArchConfig

from .errors import ConversionError
from .plans import Plan, model_class, plan_of_ours
from .plans import plan as make_plan
from .relation import their_class
from .reports import TOLERANCE, Certificate
from .sources import open_checkpoint
from .sources.base import Checkpoint

# Our class -> transformers' Auto class for the original.
AUTO_CLASSES = {reference.split(".")[1]: auto for auto, reference in AUTO_MAP.items()}
ROWS, LENGTH, SEED = 4, 48, 0


def verify(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tokens: Tensor | None = None,
    new_tokens: int = 32,
    allow_pickle: bool = False,
    progress: bool = True,
) -> Certificate:
    """Compare a public checkpoint, run by transformers' own class, with the folder it was converted into.

    Both models are held in memory in float32.

    Args:
        a, b: the original and the converted model in either order: folders, Hub ids, or a GGUF file for the original.
        tokens: (B, T) prompts; None: four rows drawn with a fixed seed. Rows after the first are padded, each longer
            than the one before: a decoder's by masking their beginning, an encoder's their end.
        new_tokens: greedy tokens to compare, fewer where the model's positions end before.
        allow_pickle: the original may be a pickle.
        progress: say on stderr what is being done.

    Raises:
        ConversionError: not exactly one of the two is an llmarch model, or one cannot be read.
    """
    sides = [open_checkpoint(side, allow_pickle=allow_pickle) for side in (a, b)]
    ours = [side for side in sides if side.config.get("model_type") == LlmArchConfig.model_type]
    theirs = [side for side in sides if side not in ours]
    if len(ours) != 1:
        raise ConversionError(
            f"One of {a} and {b} must be an llmarch model and the other its original; {len(ours)} are."
        )
    with status(progress) as say:
        return compare(theirs[0], ours[0], tokens, new_tokens, say)


def compare(
    original: Checkpoint, converted: Checkpoint, tokens: Tensor | None, new_tokens: int, say: Callable[[str], None]
) -> Certificate:
    family = None if (converted.config.get("converted_from") or {}).get("family") else original.config.get("model_type")
    export = plan_of_ours(converted, family)
    dropped = make_plan(original.config, original.shapes, family=export.family).dropped
    say("loading the original with transformers' own class")
    native = load_model(native_class(export), original)
    say("loading the converted model")
    model = load_model(model_class(export), converted)

    new_tokens = new_tokens if model.can_generate() else 0
    ids, mask = prompts(tokens, export.config, new_tokens)
    if export.config.topology == "decoder" and not takes_positions(native, export.config):
        mask = torch.ones_like(mask)  # BART's decoder alone counts padding as text
    new_tokens = max(0, min(new_tokens, export.config.max_position_embeddings - ids.shape[1]))
    say(f"comparing logits and hidden states over {int(mask.sum())} tokens")
    expected, found = (run(m, ids, mask, export.config.topology) for m in (native, model))
    difference, spread = difference_and_spread(expected[-1], found[-1])
    layers = [difference_and_spread(e, f) for e, f in zip(expected[:-1], found[:-1], strict=True)]
    # "Not at most", so that a NaN counts as a divergence.
    divergent = [i for i, (apart, width) in enumerate(layers) if not apart <= TOLERANCE * width]
    say(f"generating {new_tokens} tokens with each")
    greedy = [generate(m, ids, mask, new_tokens) for m in (native, model)]

    say("exporting in memory and comparing bytes")
    # What transformers makes of a GGUF is in its model only; a folder's bytes are on disk.
    loaded = native.state_dict() if "gguf_file" in original.native_kwargs else {}
    expected_digests = {
        name: digest(loaded[name] if name in loaded else original.read(name))
        for name in sorted(original.names)
        if name not in dropped
    }
    found_digests = {name: digest(tensor) for name, tensor in export.stream(converted.read, to="theirs")}
    different = [
        name
        for name in sorted({*expected_digests, *found_digests})
        if expected_digests.get(name) != found_digests.get(name)
    ]
    whole = hashlib.sha256("".join(f"{name} {value}\n" for name, value in expected_digests.items()).encode())
    return Certificate(
        original=original.source,
        ours=converted.source,
        family=export.family.name,
        prompts=ids.shape[0],
        prompt_tokens=int(mask.sum()),
        max_logit_difference=difference,
        logit_spread=spread,
        relative_logit_difference=difference / spread if spread else float(difference > 0),
        argmax_agreement=(expected[-1].argmax(-1) == found[-1].argmax(-1)).double().mean().item(),
        new_tokens=new_tokens,
        greedy_equal=torch.equal(*greedy),
        first_divergent_layer=divergent[0] if divergent else None,
        tensors=len(expected_digests),
        tensors_different=tuple(different),
        dropped=len(dropped),
        sha256=whole.hexdigest(),
        tolerance=TOLERANCE,
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
    )


def native_class(export: Plan) -> Any:
    """transformers' class of the original: an Auto class cannot tell an encoder alone from the whole model."""
    names = their_class(export.family, export.architecture, {"topology": export.config.topology})
    named = getattr(transformers, names[0], None) if names else None
    return named or getattr(transformers, AUTO_CLASSES[export.architecture])


def takes_positions(native: Any, config: LlmArchConfig) -> bool:
    """Whether it can be told that a text begins behind its padding, or need not be told."""
    told = "position_ids" in inspect.signature(native.forward).parameters
    return told or config.position_encoding not in ("learned", "sinusoidal")


def load_model(auto: Any, checkpoint: Checkpoint) -> Any:
    try:
        model = auto.from_pretrained(**checkpoint.native_kwargs, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ConversionError(f"{checkpoint.source} could not be loaded by {auto.__name__}: {error}") from error
    # Penalties and stop tokens would hide or cut short what is compared.
    model.generation_config = GenerationConfig()
    return model.eval()


def prompts(tokens: Tensor | None, config: LlmArchConfig, new_tokens: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (B, T); row r is padded over r / (B + 1) of it, at its end where an encoder
    reads it, else at its beginning."""
    if tokens is None:
        length = max(2, min(LENGTH, config.max_position_embeddings - new_tokens))
        # Words that both sides of a translator know.
        words = min(config.vocab_size, (config.source_stack or {}).get("vocab_size", config.vocab_size))
        tokens = torch.randint(words, (ROWS, length), generator=torch.Generator().manual_seed(SEED))
    rows, length = tokens.shape
    starts = torch.arange(rows) * length // (rows + 1)
    mask = (torch.arange(length) >= starts[:, None]).long()
    if config.topology == "decoder":
        return tokens, mask
    mask = mask.flip(-1)
    if config.classifier_pooling == "eos":
        # Once in each row, at its end: transformers' classifiers want as many everywhere.
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else cast(int, config.eos_token_id)
        tokens = tokens.where(tokens != end, (end + 1) % config.vocab_size)
        tokens = tokens.scatter(1, mask.sum(-1, keepdim=True) - 1, end)
    # Some encoders count positions by the padding token, not by the mask.
    return tokens.where(mask.bool(), 0 if config.pad_token_id is None else config.pad_token_id), mask


def given(ids: Tensor, mask: Tensor, topology: str) -> dict[str, Any]:
    """What a model is called with."""
    inputs = {"input_ids": ids, "attention_mask": mask}
    if topology == "encoder-decoder":
        # Another row's text. Its padding comes last: transformers' Switch lets it take the places of later tokens.
        return {**inputs, "decoder_input_ids": ids.flip(0), "decoder_attention_mask": mask.flip(0)}
    if topology == "decoder":
        # Counted from the first real token, as `generate` does: a learned table must not depend on the padding.
        return {**inputs, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return inputs


def numbers(output: Mapping[str, Any], real: Tensor) -> Tensor:
    """(N, channels): what a class is asked for, at the positions `real` (B, T) where it is a number a position."""
    if "start_logits" in output:
        return torch.stack((output["start_logits"], output["end_logits"]), dim=-1)[real]
    values = output["logits"] if "logits" in output else output["last_hidden_state"]
    return values[real] if values.dim() == 3 else values


@torch.no_grad()
def run(model: Any, ids: Tensor, mask: Tensor, topology: str) -> list[Tensor]:
    """Hidden states and, last, logits at the positions that are not padding, each (N, channels) in float64."""
    inputs = given(ids, mask, topology)
    cache = {"use_cache": False} if model.can_generate() else {}
    output = model(**inputs, **cache, output_hidden_states=True)
    read, written = mask.bool(), inputs.get("decoder_attention_mask", mask).bool()
    states = [layer[read] for layer in output.get("encoder_hidden_states") or ()]
    states += [layer[written] for layer in output.get("decoder_hidden_states") or output.get("hidden_states") or ()]
    return [tensor.double() for tensor in (*states, numbers(output, written))]


def generate(model: Any, ids: Tensor, mask: Tensor, new_tokens: int) -> Tensor:
    if not new_tokens:
        return ids
    # An encoder-decoder begins with any one token, the same for both models.
    greedy = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, decoder_start_token_id=0)
    return model.generate(ids, attention_mask=mask, generation_config=greedy)


def difference_and_spread(expected: Tensor, found: Tensor) -> tuple[float, float]:
    """Largest absolute difference, and largest minus smallest expected value."""
    return (expected - found).abs().max().item(), (expected.max() - expected.min()).item()


def digest(tensor: Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    hashed.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()


@contextmanager
def status(progress: bool) -> Iterator[Callable[[str], None]]:
    """A function that says what is being done, on stderr, in place of transformers' own bars."""
    from rich.console import Console

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with Console(stderr=True, quiet=not progress).status("opening") as line:
            yield line.update
    finally:
        if bars:
            logging.enable_progress_bar()
