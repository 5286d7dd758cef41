"""vLLM: `vllm serve FOLDER` for a folder of ours, without `trust_remote_code`.

The entry point `vllm.general_plugins` in pyproject.toml has vLLM call `register` in each of its processes.
"""

from hf_llmarch.model.modeling_llmarch import LlmArchForCausalLM

# vLLM's own class, which runs a transformers model with vLLM's attention and cache in place of transformers' own.
BACKEND = "vllm.model_executor.models.transformers:TransformersForCausalLM"


def register() -> None:
    """Make the Auto classes know ours, which importing the package does, and vLLM serve them by its transformers
    backend."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(LlmArchForCausalLM.__name__, BACKEND)
