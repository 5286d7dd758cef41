"""The words in which a part of the model says what it asks of whatever runs it.

A part (an attention, a position encoding, a router, a norm) declares `facts` on its class; a switch that asks for
something by itself says so in `switch(…, asks=…)`. Attention implementations and forms of parallelism list the features
that they honour (`backends.py`). What a config asks for and an implementation does not honour is refused by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple

Number = float | int  # a field annotated `float` alone would refuse the JSON number 1
Config = Any  # an LlmArchConfig, whose module imports this one


class Feature(Enum):
    """Something beyond softmax(q.k) v over a causal text that a model may need. The value completes "it needs …"."""

    SOFT_CAP = "a bound on attention scores"
    SINKS = "a learned logit for each head that joins the softmax"
    SCORE_BIAS = "a bias that is added to attention scores"
    WINDOWS = "a mask of windows"
    CHUNKS = "a mask of chunks"
    BOTH_SIDES = "attention to later tokens"
    TWO_STACKS = "an encoder beside the decoder"
    TWO_WIDTHS = "a cache whose keys and values differ in width"
    WHOLE_ROWS = "the whole of a row, and rows that hold one text each"
    ALL_HEADS = "numbers that belong to all heads together"
    BEFORE_LAYERS = "an operation between the token embedding and the first layer"
    AFTER_LAYERS = "an operation between the final norm and the output head"
    HEAD_TRANSFORM = "layers before the output head"
    SCALE_BEFORE_CAP = "logits that are scaled before they are bounded"
    UNDECLARED = "plain operations, because its class declares no `facts`"


# -- parts -----------------------------------------------------------------------------------------------------------

# Tensor-parallel style of a parameter that every device holds whole and applies to its own heads or columns only. Each
# device then computes a part of the gradient, and the parts are summed.
SHARED = "replicated_with_grad_allreduce"


def stays_whole(config: Config, layers: list[Config]) -> dict[str, str]:
    """The tensor-parallel plan of a part that every device holds, and computes, whole."""
    return {}


@dataclass(frozen=True)
class Facts:
    """What a part declares, as the class attribute `facts`.

    Args:
        asks: the features that whatever runs the part must honour.
        tensor_plan: an attention's tensor-parallel plan: a function of the model's config and of its distinct layer
            configs that returns transformers' style for each submodule to be cut, by its name within the attention.
            Empty: every device holds and computes the attention whole.
    """

    asks: tuple[Feature, ...] = ()
    tensor_plan: Callable[[Config, list[Config]], dict[str, str]] = stays_whole


# What is known of a part whose class declares nothing: that plain operations run it.
UNDECLARED = Facts(asks=(Feature.UNDECLARED,))


def facts(part: type) -> Facts:
    """What the class itself declares. A declaration is not inherited, because a subclass does something else."""
    return vars(part).get("facts", UNDECLARED)


# -- switches --------------------------------------------------------------------------------------------------------


class Condition(NamedTuple):
    """Something that may hold of a config, in words and as a function."""

    text: str
    holds: Callable[[Config], bool]


def equals(name: str, *values: Any) -> Condition:
    return Condition(f"{name}={' or '.join(map(repr, values))}", lambda c: getattr(c, name) in values)


def differs(name: str, *values: Any) -> Condition:
    text = f"a {name} other than {' or '.join(map(repr, values))}"
    return Condition(text, lambda c: getattr(c, name) not in values)


@dataclass(frozen=True)
class Switch:
    """What a field of the config declares of itself.

    Args:
        default: the field's default.
        needs: the condition without which nothing would read the field, so that any other value is refused.
        per_layer: whether `per_layer_config` may override the field, or the condition under which it may. False: the
            model has one value.
        above: a bound that a number must exceed.
        least: the least number allowed.
        most: the greatest number allowed.
        follows: the fields from which the value is derived where it is not given.
        inert: whether the field only says how a model is stored, cached or trained, never what it computes.
        read_by: the classes with a head that read the field. Empty: it is read whatever the head is.
        live: whether the field may be set on the config of a model, because it is read whenever it is needed, or
            because it tells the shapes of weights, which whoever cuts weights states anew.
        asks: the feature that any value but the default asks of whatever runs the model; or a function of the config
            that returns the feature, or None where there is nothing to ask for.
    """

    default: Any
    needs: Condition | None = None
    per_layer: bool | Condition = True
    above: Number | None = None
    least: Number | None = None
    most: Number | None = None
    follows: tuple[str, ...] = ()
    inert: bool = False
    read_by: tuple[str, ...] = ()
    live: bool = False
    asks: Feature | Callable[[Config], Feature | None] | None = None

    def asked(self, config: Config, value: Any) -> Feature | None:
        """The feature that a config asks for by this field's value."""
        if self.asks is None or isinstance(self.asks, Feature):
            return None if value == self.default else self.asks
        return self.asks(config)

    def refuse(self, name: str, value: Any) -> None:
        """
        Raises:
            ValueError: naming a number that is NaN or infinite, or outside the declared bounds.
        """
        if isinstance(value, bool) or not isinstance(value, Number):
            return
        if not isfinite(value):
            raise ValueError(f"{name}={value!r} must be a finite number.")
        if self.above is not None and value <= self.above:
            raise ValueError(f"{name}={value!r} must be greater than {self.above}.")
        if self.least is not None and value < self.least:
            raise ValueError(f"{name}={value!r} must be at least {self.least}.")
        if self.most is not None and value > self.most:
            raise ValueError(f"{name}={value!r} must be at most {self.most}.")
