"""Tensors that our model does not read and others do: kept beside it, and given back on export.

DeepSeek-V3's layer for multi-token prediction is one. They lie in a folder of their own, where no loader looks for
weights, under the names and in the bytes of the source. The source's model card and its code lie there as well: see
`cards` and `source_code`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .destination import write_tensors
from .plans import Plan
from .sources.base import Checkpoint, TensorInfo
from .sources.files import SAFETENSORS, open_weights

FOLDER = "kept_aside"


@dataclass(frozen=True)
class Aside:
    """Tensors that go along with a model without being part of it.

    Attributes:
        tensors: name -> shape and dtype.
        read: one of them, by name.
    """

    tensors: dict[str, TensorInfo]
    read: Callable[[str], Tensor]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.tensors:
            yield name, self.read(name)

    def write(
        self, directory: Path, max_shard_size: int | str = "5GB", advance: Callable[[int], None] = lambda nbytes: None
    ) -> None:
        """Put them beside a model of ours."""
        if self.tensors:
            (directory / FOLDER).mkdir(exist_ok=True)
            write_tensors(directory / FOLDER, self.stream(), self.tensors, max_shard_size, advance)


def to_keep(checkpoint: Checkpoint, plan: Plan) -> Aside:
    """What a plan keeps aside of a foreign checkpoint."""
    return Aside({name: checkpoint.tensors[name] for name in plan.aside}, checkpoint.read)


def kept(checkpoint: Checkpoint, plan: Plan) -> Aside:
    """What lies beside a model of ours and goes back with it, if it goes back to the family that it came from.

    Raises:
        CheckpointError: the folder is damaged.
    """
    folder, origin = checkpoint.path / FOLDER, plan.config.converted_from or {}
    if not SAFETENSORS.is_in(folder) or origin.get("family") != plan.family.name:
        return Aside({}, checkpoint.read)
    holder = open_weights(folder, SAFETENSORS)
    return Aside({name: file.tensors[name] for name, file in holder.items()}, lambda name: holder[name].read(name))


def true_config(plan: Plan, aside: Aside) -> dict[str, Any]:
    """The family's config.json, which counts the layers ahead that are there, and no other."""
    counter = plan.family.layers_ahead
    if not counter or counter not in plan.foreign_config:
        return plan.foreign_config
    origin = (plan.config.converted_from or {}).get("config", {})
    return {**plan.foreign_config, counter: origin.get(counter, 0) if aside.tensors else 0}
