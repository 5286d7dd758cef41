"""What decoders share beside the class over the vocabulary: a base model, and heads that classify texts or tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..entries import Derived, Entry, Values
from ..ops import both, only
from ..rules import Family, Rule
from .common import CAUSAL_LM, SPELLINGS
from .encoders import ANSWER, MODEL, SEQUENCE, TOKEN, named, task

# Which heads a family has, besides the base model: all three, or the two that classify.
ALL_HEADS = (SEQUENCE, TOKEN, ANSWER)
CLASSIFIERS = (SEQUENCE, TOKEN)


def _token_head(native: Any) -> Values:
    """Only tokens' classifiers have a bias, and dropout, of 0.1 where no field says another."""
    if task(native) != "TokenClassification":
        return {}
    given = (getattr(native, name, None) for name in ("classifier_dropout", "hidden_dropout"))
    return {"classifier_bias": True, "classifier_dropout": next((p for p in given if p is not None), 0.1)}


def _token_head_to_theirs(config: Any) -> Values:
    return {"classifier_dropout": config.classifier_dropout} if task(config) == "TokenClassification" else {}


HEADS: list[Entry] = [Derived((), _token_head, _token_head_to_theirs)]


def _answers(config: Any) -> bool:
    return task(config) == "QuestionAnswering"


def in_every_class(rules: Sequence[Rule], base: str = "model.") -> list[Rule]:
    """A base model's rules for all classes, and those of the heads. Question answerers call the model `transformer`.

    Args:
        base: what names of the base model begin with elsewhere.
    """

    def renamed(name: str) -> str:
        return f"transformer.{name.removeprefix(base)}" if name.startswith(base) else name

    return [
        *only(lambda config: not _answers(config), rules),
        *only(_answers, [replace(rule, theirs=tuple(map(renamed, rule.theirs))) for rule in rules]),
        *both("score"),
        *both("qa_outputs"),
    ]


def decoder(
    name: str, theirs: str, config: Sequence[Entry], weights: Sequence[Rule], *heads: str, **options: Any
) -> Family:
    """A family in LLaMA's frame, with its base model and heads.

    Args:
        theirs: what their classes' names begin with.
        heads: our classes beside the base model and the one over the vocabulary.
        options: further fields of `Family`.
    """
    return Family(
        name,
        config=[*config, *(HEADS if heads else [])],
        weights=in_every_class(weights) if heads else weights,
        **{"spellings": SPELLINGS, "architectures": named(theirs, CAUSAL_LM, MODEL, *heads), **options},
    )
