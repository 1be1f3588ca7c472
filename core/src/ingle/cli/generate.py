"""``ingle generate``."""

from __future__ import annotations

import sys

from ingle.cli.demo_model import or_demo_model
from ingle.cli.sampling import SamplingFlags
from ingle.config import EngineConfig
from ingle.errors import ConfigError


def generate(engine: EngineConfig, sampling: SamplingFlags, prompt: str | None = None) -> None:
    """Continue a text and print what comes as it comes; no chat template.

    Args:
        prompt: The text to continue; without it, standard input is read.
    """
    from ingle.cli.session import Session

    text = sys.stdin.read() if prompt is None else prompt
    if not text:
        raise ConfigError(
            "--prompt is empty: ingle generate MODEL PROMPT, or send a text to standard input."
        )
    session = Session.open(or_demo_model(engine))
    token_ids = session.tokenizer.encode(text)
    for piece in session.text(token_ids, sampling.params(session.core.info.generation_defaults)):
        print(piece, end="", flush=True)
    print()
