"""What `generate()` does besides transformers' own."""

from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers.generation import GenerationMixin

from .linear import Linear

# The number of generated tokens after which weights are prepared, which takes about as long as two decoding steps.
STEPS_UNPREPARED = 8


class LlmArchGenerationMixin(GenerationMixin):
    """`generate()` that, once a text gets long, prepares the weights for many steps, see `Products.prepacked`."""

    _steps = 0
    _preparation: ExitStack | None = None

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers."""
        with ExitStack() as preparation:
            self._steps, self._preparation = 0, preparation
            try:
                return super().generate(*args, **kwargs)
            finally:
                self._preparation = None

    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # transformers calls this between two tokens, outside of any compiled code.
        self._steps += 1
        if self._steps == STEPS_UNPREPARED and self._preparation is not None and isinstance(self, nn.Module):
            self._preparation.enter_context(Linear.products.prepacked(self))
        return super()._update_model_kwargs_for_generation(*args, **kwargs)
