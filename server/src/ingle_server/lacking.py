"""Request fields of vLLM, Aphrodite and TabbyAPI that ask for what Ingle lacks: refused by name.

Ignoring one would change the answer in silence. Values that ask for nothing pass.
"""

from __future__ import annotations

from typing import Any, Final

from ingle_server.errors import bad_request, not_supported
from ingle_server.schemas.sampling import SamplingFields

_EMPTY: Final[tuple[Any, ...]] = (None, "", {}, [])

LACKING: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("use_beam_search", (None, False), "Beam search"),
    ("num_beams", (None, 0, 1), "Beam search"),
    ("guidance_scale", (None, 0, 1), "Classifier-free guidance"),
    ("cfg_scale", (None, 0, 1), "Classifier-free guidance"),
    ("token_healing", (None, False), "Token healing"),
    ("encoder_repetition_penalty", (None, 1), "The encoder's repetition penalty"),
    ("penalty_alpha", (None, 0), "Contrastive search"),
    ("repetition_decay", (None, 0), "A repetition penalty that decays"),
    ("response_prefix", _EMPTY, "A prefix of the answer (send it as the assistant's last turn)"),
    ("priority", (None, 0), "A priority of requests"),
    ("thinking_token_budget", (None,), "A budget for thinking"),
    ("repetition_detection", _EMPTY, "Detection of repetitions"),
    ("logprob_token_ids", _EMPTY, "Logprobs of chosen tokens"),
    ("logits_processors", _EMPTY, "Code for logits that comes with a request"),
    ("kv_transfer_params", _EMPTY, "Moving caches between servers"),
    ("mm_processor_kwargs", _EMPTY, "Images, audio and video"),
    ("media_io_kwargs", _EMPTY, "Images, audio and video"),
    ("vllm_xargs", _EMPTY, "vllm_xargs"),
    ("aphrodite_xargs", _EMPTY, "aphrodite_xargs"),
)
"""(field, values that ask for nothing, what it asks for)."""


def check_lacking(fields: SamplingFields) -> None:
    """Refuses what is not there.

    Raises:
        ApiError: 400 that names the field.
    """
    if fields.prompt_embeds is not None:
        raise bad_request(
            "prompt_embeds is refused: tensors are not taken from clients.", "prompt_embeds"
        )
    for name, harmless, what in LACKING:
        if getattr(fields, name) not in harmless:
            raise not_supported(name, what)
    target = fields.adaptive_target
    if target is not None and not (isinstance(target, int | float) and target <= 0):
        raise not_supported("adaptive_target", "The adaptive-p sampler")
    if fields.spaces_between_special_tokens is False and fields.skip_special_tokens is False:
        raise not_supported(
            "spaces_between_special_tokens", "Leaving out the spaces between special tokens"
        )
