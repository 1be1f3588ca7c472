"""One engine in this process, one request at a time: what generate, chat and bench run on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ingle.checkpoint.chat_template import ChatTemplate, load_chat_template
from ingle.checkpoint.tokenizer import Tokenizer
from ingle.config import EngineConfig
from ingle.engine.engine_core import EngineCore
from ingle.errors import CheckpointError, EngineDeadError
from ingle.request import CompletionOutput, SamplingParams


class Session:
    """A loaded model that answers in this thread.

    Args:
        core: The engine; nobody else may use it.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._ids = itertools.count()

    @classmethod
    def open(cls, config: EngineConfig) -> Session:
        """Loads the model.

        Raises:
            ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be loaded.
        """
        from ingle.engine.first_import import import_builder

        return cls(import_builder()(config))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            CheckpointError: When the model has none.
        """
        if self.core.tokenizer is None:
            raise CheckpointError(f"{self.core.info.model} has no tokenizer.")
        return self.core.tokenizer

    def chat_template(self) -> ChatTemplate:
        """The model's chat template, compiled.

        Raises:
            CheckpointError: When it has none or it is damaged.
        """
        return load_chat_template(self.tokenizer.path, self.tokenizer)

    def stream(
        self, token_ids: Sequence[int], params: SamplingParams
    ) -> Iterator[CompletionOutput]:
        """What is new after each step. Leaving the loop early ends the request.

        Raises:
            RequestError: When the request cannot be computed.
            EngineDeadError: When a step failed.
        """
        name = f"cli-{next(self._ids)}"
        self.core.add_request(name, list(token_ids), params)
        try:
            while self.core.has_work():
                for output in self.core.step():
                    yield from output.outputs
        finally:
            self.core.abort(name)

    def text(self, token_ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
        """The pieces of text as they become certain.

        Raises:
            RequestError: When the request cannot be computed.
            EngineDeadError: When it failed on the way.
        """
        for output in self.stream(token_ids, params):
            if output.finish_reason == "error":
                raise EngineDeadError(output.error or "the request failed")
            if output.text:
                yield output.text
