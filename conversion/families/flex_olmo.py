"""FlexOLMo: OLMo 2's block with OLMoE's experts, each trained on data of its own. arXiv 2507.07024."""

from ..entries import Field
from .common import ROPE
from .decoders import decoder
from .experts import AUXILIARY_LOSS, LOSS_OUTPUT, ONLY_EXPERTS, ROUTED, ROUTER_IN_MODEL_DTYPE, routing
from .olmo2 import OLMO2, OLMO2_WEIGHTS

FAMILY = decoder(
    "flex_olmo",
    "FlexOlmo",
    [
        *OLMO2,
        *ROPE,
        *routing(),
        Field("norm_topk_prob"),
        *ONLY_EXPERTS,
        *AUXILIARY_LOSS,
        *ROUTER_IN_MODEL_DTYPE,
    ],
    [*OLMO2_WEIGHTS, *ROUTED],
    inert=LOSS_OUTPUT,
)
