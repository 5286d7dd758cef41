"""transformers' test mixins on our classes, in the styles of `styles.py`: the tests that each native class passes."""

import unittest
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from excused import EXCUSED
from styles import STYLES, Switches
from tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers.models.auto import modeling_auto

from hf_llmarch import (
    LlmArchConfig,
    LlmArchForCausalLM,
    LlmArchForConditionalGeneration,
    LlmArchForMaskedLM,
    LlmArchForQuestionAnswering,
    LlmArchForSequenceClassification,
    LlmArchForTokenClassification,
    LlmArchModel,
)

# The mixins tell by these tables which labels a class takes.
TABLES: dict[str, type] = {
    "MODEL_MAPPING_NAMES": LlmArchModel,
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": LlmArchForCausalLM,
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": LlmArchForMaskedLM,
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": LlmArchForConditionalGeneration,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": LlmArchForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": LlmArchForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": LlmArchForQuestionAnswering,
}
for table, model in TABLES.items():
    getattr(modeling_auto, table)[LlmArchConfig.model_type] = model.__name__

# By a config's fields and by the class the mixins tell what a model has; ours have the fields of all architectures. The
# tests of a part, by the beginning of their names, and whether a config has the part.
PARTS: dict[str, tuple[str, Callable[[LlmArchConfig], bool]]] = {
    "test_model_rope": ("RoPE", lambda c: c.position_encoding == "rope"),
    "test_eager_matches_batched_and_grouped": (
        "packed experts",
        lambda c: c.num_experts is not None and c.experts_layout == "packed",
    ),
}

TASKS = (LlmArchForSequenceClassification, LlmArchForQuestionAnswering)


class Windowless(LlmArchConfig):
    """The config of a model without windows. Ours has the field none the less, and a test sets it wherever it is."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "sliding_window" or value is None:
            super().__setattr__(name, value)


class Tester:
    """What the mixins ask of a `model_tester`: a tiny config, its sizes, and inputs of shape (batch, length)."""

    batch_size = 13
    seq_length = encoder_seq_length = decoder_seq_length = key_length = 7
    is_training = True
    causal_lm_class: type | None = None
    config_class: type[LlmArchConfig] = LlmArchConfig

    def __init__(self, switches: Switches) -> None:
        self.switches = switches
        self.hidden_size = switches["hidden_size"]
        self.num_hidden_layers = switches["num_hidden_layers"]
        self.num_attention_heads = switches["num_attention_heads"]

    def get_config(self) -> LlmArchConfig:
        return self.config_class(**self.switches)

    def tokens(self) -> torch.Tensor:
        """Of no special meaning, except that each text ends with the one end token of which classifiers read."""
        tokens = ids_tensor([self.batch_size, self.seq_length], self.switches["vocab_size"]).clamp(min=3)
        tokens[:, -1] = self.switches["eos_token_id"]
        return tokens

    def prepare_config_and_inputs_for_common(self) -> tuple[LlmArchConfig, dict[str, torch.Tensor]]:
        tokens = self.tokens()
        # Of each text another length is real: of the first, one token.
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens).tril()}


class PairTester(Tester):
    """The same with a target text beside the source."""

    def prepare_config_and_inputs_for_common(self) -> tuple[LlmArchConfig, dict[str, torch.Tensor]]:
        source, target = self.tokens(), self.tokens()
        masks = {"attention_mask": torch.ones_like(source), "decoder_attention_mask": torch.ones_like(target)}
        return self.get_config(), {"input_ids": source, "decoder_input_ids": target, **masks}


class CausalTester(Tester):
    causal_lm_class = LlmArchForCausalLM


class Style(ModelTesterMixin):
    """The part that all topologies share."""

    switches: ClassVar[Switches]
    inputs: ClassVar[type[Tester]] = Tester

    def setUp(self) -> None:
        self.model_tester = self.inputs(self.switches)
        config = self.model_tester.get_config()
        for tests, (part, has) in PARTS.items():
            if self._testMethodName.startswith(tests) and not has(config):
                self.skipTest(f"no {part} in this style")
        if self._testMethodName.startswith("test_eager_matches_sdpa") and config.sliding_window is None:
            self.model_tester.config_class = Windowless


class Decoder(Style, GenerationTesterMixin, TrainingTesterMixin, TensorParallelTesterMixin):
    all_model_classes = (LlmArchModel, LlmArchForCausalLM, LlmArchForTokenClassification, *TASKS)
    inputs = CausalTester


class Encoder(Style):
    all_model_classes = (LlmArchModel, LlmArchForMaskedLM, LlmArchForTokenClassification, *TASKS)


class EncoderDecoder(Style, GenerationTesterMixin):
    all_model_classes = (LlmArchModel, LlmArchForConditionalGeneration, *TASKS)
    is_encoder_decoder = True
    inputs = PairTester

    def test_base_model_prefix_loads_base_weights(self) -> None:
        # The encoder of our base model is a base model, which the test would take for the base of a head.
        self.all_model_classes = self.all_model_classes[1:]
        super().test_base_model_prefix_loads_base_weights()


TOPOLOGIES: dict[str, type[Style]] = {"decoder": Decoder, "encoder": Encoder, "encoder-decoder": EncoderDecoder}


def case(style: str, switches: Switches) -> type[unittest.TestCase]:
    """The test case of a style, in which what `EXCUSED` names must fail."""
    mixins = TOPOLOGIES[switches.get("topology", "decoder")]
    body: dict[str, Any] = {"switches": switches, "model_tester": None, "__module__": __name__}
    tests = type(style, (mixins, unittest.TestCase), body)
    for name in dir(tests):
        test = getattr(tests, name)  # None: its place is taken by one for each of its parameters
        if test is not None and any(excuse.covers(name, style) for excuse in EXCUSED):
            setattr(tests, name, unittest.expectedFailure(test))
    return tests


for style, switches in STYLES.items():
    globals()[f"Test_{style}"] = case(style, switches)
