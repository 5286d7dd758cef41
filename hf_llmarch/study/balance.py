"""A view of balance: how the tokens of a mixture of experts spread over its experts, and a warning when they do not.

`expert_load` looks at one batch, `ExpertLoadCallback` at a whole training under `Trainer`. Neither changes the model;
this file does not travel with a pushed one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_llmarch.model.experts import SparseFeedForward
from hf_llmarch.model.routing import ExpertChoiceRouter, Router

logger = logging.get_logger(__name__)

# A layer whose load has less than this share of the highest entropy is said to collapse: 8 experts of which 2 get
# everything are at 1/3, of which 4 do at 2/3.
COLLAPSED = 0.5


@dataclass(frozen=True)
class ExpertLoad:
    """How often each expert of one sparse layer was picked.

    Attributes:
        name: of the sparse feed-forward in the model, such as `model.layers.3.mlp`.
        counts: picks of each expert, padding not counted, before any capacity.
    """

    name: str
    counts: tuple[int, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """The counts as shares of one."""
        total = sum(self.counts)
        return tuple(count / total if total else 0.0 for count in self.counts)

    @property
    def entropy(self) -> float:
        """Entropy of the shares over log E: 1 for an even load, 0 for one expert that gets everything."""
        if len(self.counts) == 1:
            return 1.0
        shares = torch.tensor(self.shares, dtype=torch.float64)
        return (torch.special.entr(shares).sum() / torch.tensor(len(shares), dtype=torch.float64).log()).item()

    @property
    def busiest(self) -> float:
        """The busiest expert's load in units of the mean load; 1 for an even load, E at most."""
        return max(self.shares) * len(self.counts)

    def __str__(self) -> str:
        unused = self.counts.count(0)
        return (
            f"{self.name}: entropy {self.entropy:.2f}, busiest expert {self.busiest:.1f}x the mean, "
            f"{unused} of {len(self.counts)} never picked"
        )


class LoadCounter:
    """Counts the picks of every router of a model, from its forward passes, while attached.

    Raises:
        ValueError: for a model without experts, and for expert choice, whose loads are even by construction.
    """

    def __init__(self, model: nn.Module):
        self.layers = {name: part for name, part in model.named_modules() if isinstance(part, SparseFeedForward)}
        if not self.layers:
            raise ValueError("The model has no sparse layers: its config's num_experts is None.")
        if any(isinstance(layer.gate, ExpertChoiceRouter) for layer in self.layers.values()):
            raise ValueError("router_type='expert_choice' gives every expert the same load: there is nothing to see.")
        self.counts: dict[str, torch.Tensor] = {}
        self.handles: list[RemovableHandle] = []

    def attach(self, training_only: bool = False) -> None:
        """Begin to count; with `training_only`, passes in evaluation mode are left out."""
        for name, layer in self.layers.items():
            self.handles += self.watch(name, layer, training_only)

    def watch(self, name: str, layer: SparseFeedForward, training_only: bool) -> tuple[RemovableHandle, ...]:
        real: list[torch.Tensor | None] = [None]

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            real[0] = args[1] if len(args) > 1 else kwargs.get("real_tokens")

        def after(router: Router, args: tuple[Any, ...], routing: tuple[torch.Tensor, ...]) -> None:
            if training_only and not router.training:
                return
            # Not the picks of the output, which expert parallelism rewrites for its own process.
            _, picks = router.choose(routing[0].detach())
            counted = torch.ones_like(picks) if real[0] is None else real[0].flatten()[:, None].expand_as(picks).long()
            total = torch.zeros(router.experts, dtype=torch.long, device=picks.device)
            # Stays on the device: no wait for it in the middle of a step.
            total.index_add_(0, picks.flatten(), counted.flatten())
            self.counts[name] = self.counts[name] + total if name in self.counts else total

        return layer.register_forward_pre_hook(before, with_kwargs=True), layer.gate.register_forward_hook(after)

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def take(self) -> list[ExpertLoad]:
        """The loads since the last call, in the order of the layers."""
        counts, self.counts = self.counts, {}
        return [ExpertLoad(name, tuple(counts[name].tolist())) for name in self.layers if name in counts]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def expert_load(model: nn.Module, *args: Any, **kwargs: Any) -> list[ExpertLoad]:
    """The load of every sparse layer for one batch, in evaluation mode and without gradients.

    Args:
        model: one of ours, also wrapped (PEFT, DistributedDataParallel).
        args, kwargs: of its forward, such as `input_ids` and `attention_mask`; padding is not counted.

    Returns:
        One `ExpertLoad` a sparse layer, in their order.

    Raises:
        ValueError: for a model without experts, and for expert choice.
    """
    counter = LoadCounter(model)
    counter.attach()
    try:
        with evaluating(model):
            model(*args, **kwargs)
    finally:
        counter.detach()
    return counter.take()


def collapsed(loads: Sequence[ExpertLoad], below: float = COLLAPSED) -> list[ExpertLoad]:
    """The layers whose normalised entropy is below a threshold."""
    return [load for load in loads if load.entropy < below]


class ExpertLoadCallback(TrainerCallback):
    """Adds the balance of the experts to what `Trainer` logs, and warns when a layer collapses.

    With each log line, over the training steps since the one before: `expert_entropy` (the mean over layers, 1 is
    even), `expert_entropy_min` (the worst layer's) and `expert_load_max` (its busiest expert's load, in units of the
    mean). `per_layer` adds `expert_entropy/{layer}`. Counts are this process's own.

    Trainer calls its reporting integrations before callbacks that a user adds. To see the numbers there too, put this
    one first: `trainer.callback_handler.callbacks.insert(0, ExpertLoadCallback())`.

    Args:
        warn_below: normalised entropy below which a layer is reported, once until it recovers.
        per_layer: log every layer by name.
    """

    def __init__(self, warn_below: float = COLLAPSED, per_layer: bool = False):
        self.warn_below, self.per_layer = warn_below, per_layer
        self.counter: LoadCounter | None = None
        self.reported: set[str] = set()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if model is not None:
            self.counter = LoadCounter(model)
            self.counter.attach(training_only=True)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        loads = self.counter.take() if self.counter is not None else []
        if not loads:
            return
        worst = min(loads, key=lambda load: load.entropy)
        numbers = {
            "expert_entropy": sum(load.entropy for load in loads) / len(loads),
            "expert_entropy_min": worst.entropy,
            "expert_load_max": worst.busiest,
        }
        if self.per_layer:
            numbers |= {f"expert_entropy/{load.name}": load.entropy for load in loads}
        for seen in (logs, state.log_history[-1] if state.log_history else None):
            if seen is not None:
                seen.update(numbers)
        self.warn(loads)

    def warn(self, loads: Sequence[ExpertLoad]) -> None:
        low = collapsed(loads, self.warn_below)
        for load in low:
            if load.name not in self.reported:
                logger.warning(
                    f"Experts collapse in {load}. Raise router_aux_loss_coef, or set router_selection_bias=True with a "
                    "router_bias_update_rate."
                )
        self.reported = {load.name for load in low}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.counter is not None:
            self.counter.detach()
