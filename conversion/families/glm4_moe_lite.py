"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, with a list of the layers that are sparse. Zhipu 2026."""

from ..entries import Field
from .common import RMS_NORM, ROPE, SIZES
from .decoders import decoder
from .deepseek_v2 import DEEPSEEK_WEIGHTS, FINE_EXPERTS, LATENT_ATTENTION, TRAINING
from .deepseek_v3 import LAYERS_AHEAD, NO_LAYERS_AHEAD, SELECTION_BIAS, SIGMOID_ROUTER
from .experts import MLP_LAYER_TYPES

FAMILY = decoder(
    "glm4_moe_lite",
    "Glm4MoeLite",
    [
        *SIZES,
        *ROPE,
        *RMS_NORM,
        Field("hidden_act"),
        *LATENT_ATTENTION,
        Field("rope_interleave", "rope_interleaved"),
        *FINE_EXPERTS,
        *MLP_LAYER_TYPES,
        *SIGMOID_ROUTER,
        NO_LAYERS_AHEAD,
    ],
    [*DEEPSEEK_WEIGHTS, *SELECTION_BIAS],
    drops=LAYERS_AHEAD,
    layers_ahead="num_nextn_predict_layers",
    inert=TRAINING,
)
