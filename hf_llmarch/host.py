"""The release of transformers that this code runs on; any other than it was made for is refused, in one sentence.

This file travels with a pushed model. It is imported before any other name of the host, which may lack it.
"""

import re

import transformers

OLDEST, BEFORE = (5, 16, 1), (6,)
FOUND = tuple(int(part) for part in re.findall(r"\d+", transformers.__version__)[:3])
if not OLDEST <= FOUND < BEFORE:
    raise ImportError(
        "hf_llmarch supports transformers >=5.16.1,<6 and found "
        f"{transformers.__version__}: install a supported release, for example `pip install 'transformers>=5.16.1,<6'`."
    )
