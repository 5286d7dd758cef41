"""M2M-100 and NLLB: sinusoids in tensor2tensor's spacing, counted over real tokens. arXiv 2010.11125, 2207.04672."""

from typing import Any

from ..entries import Const, Derived, Field
from ..errors import UnsupportedField
from ..rules import Family
from .encoders import MODEL, named
from .stacks import (
    BART_INERT,
    BART_SPELLINGS,
    BART_WEIGHTS,
    NO_EMBEDDING_NORM,
    SEQ2SEQ_LM,
    SHARED_COPIES,
    SHARED_EMBEDDING,
    SINUSOIDS,
    bart_config,
    sinusoid_tables,
)


def _after_padding(native: Any) -> dict[str, Any]:
    """Padding has the row of its own number, and texts begin at the next."""
    if native.pad_token_id is None:
        raise UnsupportedField("pad_token_id is None, and its positions are counted from the padding's row.")
    return {"position_offset": native.pad_token_id + 1}


FAMILY = Family(
    "m2m_100",
    config=[
        *bart_config(pre_norm=True),
        Field("vocab_size"),
        *SINUSOIDS,
        Const("sinusoidal_endpoint", True),
        Const("positions_skip_padding", True),
        Derived((), _after_padding, lambda config: {}),
        *NO_EMBEDDING_NORM,
    ],
    weights=[*SHARED_EMBEDDING, *BART_WEIGHTS],
    drops=sinusoid_tables("weights"),
    spellings=BART_SPELLINGS,
    architectures=named("M2M100", SEQ2SEQ_LM, MODEL),
    copies=SHARED_COPIES,
    inert=BART_INERT,
)
