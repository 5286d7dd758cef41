"""`python -m hf_llmarch.integrations.transformers_cli serve FOLDER`: the commands of `transformers`, with our models.

`transformers serve` itself loads no plug-ins, and looks a model's class up in the module `transformers`.
"""

import transformers
from transformers.cli.transformers import app

import hf_llmarch


def add_classes() -> None:
    """Our classes where `transformers serve` looks one up by the name in `config.architectures`."""
    for name in hf_llmarch.__all__:
        if name.startswith("LlmArch"):
            setattr(transformers, name, getattr(hf_llmarch, name))


if __name__ == "__main__":
    add_classes()
    app()
