"""What `generate()` does besides the host's."""

from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers.generation import GenerationMixin

from .linear import packed

# Packing takes about as long as two decoding steps: worth it for a text that gets this far.
STEPS_UNPACKED = 8


class PackedGenerationMixin(GenerationMixin):
    """`generate()` that packs a bf16 model's weights on CPU once a text gets long, see `packed`."""

    steps = 0
    packing: ExitStack | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the host's."""
        with ExitStack() as packing:
            self.steps, self.packing = 0, packing
            try:
                return super().generate(*args, **kwargs)
            finally:
                self.packing = None

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # The host's step from one token to the next, outside of any compiled code.
        self.steps += 1
        if self.steps == STEPS_UNPACKED and self.packing is not None and isinstance(self, nn.Module):
            self.packing.enter_context(packed(self))
        return super()._update_model_kwargs_for_generation(*args, **kwargs)
