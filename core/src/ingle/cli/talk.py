"""A conversation with a model in this process."""

from __future__ import annotations

from collections.abc import Generator

from ingle.checkpoint.chat_template import Conversation
from ingle.cli.sampling import SamplingFlags
from ingle.cli.session import Session

Message = dict[str, str]


class Talk:
    """A conversation: what was said so far, and the model that goes on with it."""

    def __init__(self, session: Session, sampling: SamplingFlags, system: str | None) -> None:
        self._session = session
        self._template = session.chat_template()
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = []
        self.start_over()

    def start_over(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def answer(self, text: str) -> Generator[str, None, None]:
        """The model's answer in pieces. It is remembered as far as it was read.

        Raises:
            RequestError: When the conversation no longer fits; the message is then forgotten.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        token_ids = self._template.encode(Conversation(messages=asked))
        params = self._sampling.params(self._session.core.info.generation_defaults)
        said = ""
        try:
            for piece in self._session.text(token_ids, params):
                said += piece
                yield piece
        finally:
            if said:
                self.messages = [*asked, {"role": "assistant", "content": said}]
