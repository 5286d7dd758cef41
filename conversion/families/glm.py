"""GLM-4-9B and GLM-Edge: LLaMA with half of each head rotated in neighbouring channels. arXiv 2406.12793."""

from ..entries import Const, Entry, Field
from ..rules import Rule
from .common import ATTENTION, FUSED_MLP, HEAD, HEAD_DIM, PARTIAL_ROPE, PRE_NORMS, RMS_NORM, SIZES
from .decoders import CLASSIFIERS, decoder

GLM: list[Entry] = [
    *SIZES,
    *HEAD_DIM,
    *RMS_NORM,
    *PARTIAL_ROPE,
    Field("hidden_act"),
    Field("attention_bias"),
    Const("rope_interleaved", True),
]
GLM_WEIGHTS: list[Rule] = [*HEAD, *ATTENTION, *FUSED_MLP]

FAMILY = decoder("glm", "Glm", GLM, [*GLM_WEIGHTS, *PRE_NORMS], *CLASSIFIERS)
