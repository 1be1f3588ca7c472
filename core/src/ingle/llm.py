"""The offline interface: prompts in, finished outputs out, in the thread that calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ingle.config import EngineConfig
from ingle.engine.engine_core import EngineCore
from ingle.engine.streams import add_output
from ingle.errors import ConfigError, RequestError
from ingle.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ingle.checkpoint.chat_template import ChatTemplate, Conversation
    from ingle.checkpoint.tokenizer import Tokenizer

TextPrompt = str | Mapping[str, Any]
Prompt = TextPrompt | list[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt, ready for the engine."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    text: str | None = None


class LLM:
    """A loaded model for use from Python, one call at a time.

    Example:
        >>> llm = LLM("path/to/model", max_model_len=2048)
        >>> outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8))
        >>> outputs[0].outputs[0].text

    Args:
        model: A model folder or a hub id.
        **options: Any other field of ``EngineConfig``.

    Raises:
        ConfigError, CheckpointError, PluginError, CapacityError: Why it cannot be loaded.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = _config(model, options)
        from ingle.engine.first_import import import_builder

        self._core = import_builder()(config)
        self._num_requests = 0

    @classmethod
    def from_core(cls, core: EngineCore) -> LLM:
        """The same around an engine that exists; nobody else may use it meanwhile."""
        llm = cls.__new__(cls)
        llm._core = core
        llm._num_requests = 0
        return llm

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, all at once, and returns them finished, in order.

        Args:
            prompts: One or several of: text, ``{"prompt": text}``, a list of token ids,
                ``{"prompt_token_ids": ids}``.
            sampling_params: For all prompts, or one for each; by default the model's own.
            use_tqdm: Shows a progress bar.

        Raises:
            RequestError: A prompt or its parameters cannot be computed; nothing was then begun.
            EngineDeadError: A step failed; this object is of no more use.
        """
        listed = _listed(prompts)
        params = self._params_for(len(listed), sampling_params)
        return self._run([self._job(*pair) for pair in zip(listed, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]] | Conversation,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations, all at once, and returns the answers finished, in order.

        Args:
            messages: One conversation or several, each a list of ``{"role", "content"}``; or a
                ``Conversation`` with tools, which says everything itself.
            sampling_params: For all, or one for each; by default the model's own.
            use_tqdm: Shows a progress bar.
            add_generation_prompt: Opens the assistant's turn.
            continue_final_message: Leaves the last message's turn open, to be continued.
            chat_template_kwargs: More variables for the template.

        Raises:
            RequestError: The template refuses a conversation, or it cannot be computed.
            EngineDeadError: A step failed; this object is of no more use.
        """
        from ingle.checkpoint.chat_template import Conversation

        def conversation(listed: Sequence[Message]) -> Conversation:
            return Conversation(
                messages=listed,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                template_kwargs=chat_template_kwargs or {},
            )

        if isinstance(messages, Conversation):
            conversations = [messages]
        else:
            conversations = [conversation(listed) for listed in _listed_messages(messages)]
        prompts = [self._template.encode(conversation) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: When the model has none.
        """
        if self._core.tokenizer is None:
            raise ConfigError("This model has no tokenizer; give prompts as token ids.")
        return self._core.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend (generation_config.json)."""
        known = {field.name for field in fields(SamplingParams)}
        defaults = self._core.info.generation_defaults
        return SamplingParams(**{name: defaults[name] for name in known & defaults.keys()})

    @cached_property
    def _template(self) -> ChatTemplate:
        from ingle.checkpoint.chat_template import load_chat_template

        return load_chat_template(self.get_tokenizer().path, self.get_tokenizer())

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling_params for {count} prompts; give one for all or one each.",
                param="sampling_params",
            )
        return given

    def _job(self, prompt: Prompt, params: SamplingParams) -> _Job:
        text: str | None = None
        token_ids: Any = prompt
        if isinstance(prompt, Mapping):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        elif isinstance(prompt, str):
            text, token_ids = prompt, None
        if token_ids is None:
            if not isinstance(text, str):
                raise RequestError(
                    "A prompt must be text, a list of token ids, or a dict with prompt or "
                    f"prompt_token_ids; got {type(prompt).__name__}.",
                    param="prompt",
                )
            token_ids = self.get_tokenizer().encode(text)
        token_ids = list(token_ids)
        self._core.admission.check(token_ids, params)
        self._num_requests += 1
        return _Job(f"llm-{self._num_requests}", token_ids, params, text)

    def _run(self, jobs: list[_Job], use_tqdm: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        with _progress_bar(len(jobs), use_tqdm) as bar:
            for output in self._outputs(jobs):
                add_output(results, output)
                bar.update(int(output.finished))
        for result in results.values():
            result.outputs.sort(key=lambda completion: completion.index)
        return [results[job.request_id] for job in jobs]

    def _outputs(self, jobs: list[_Job]) -> Iterator[RequestOutput]:
        """Everything the jobs produce. However it ends, none of them is left in the engine."""
        waiting = jobs[::-1]
        try:
            while waiting or self._core.has_work():
                while waiting and self._core.has_room():
                    job = waiting.pop()
                    self._core.add_request(job.request_id, job.token_ids, job.params, job.text)
                yield from self._core.step()
        finally:
            for job in jobs:
                self._core.abort(job.request_id)


def _config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    known = {field.name for field in fields(EngineConfig)}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigError(
            f"LLM has no option {', '.join(unknown)}; it takes {', '.join(sorted(known))}."
        )
    return EngineConfig(model=model, **options)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Several prompts as they are, one as a list of one. A list of numbers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [cast("list[int]", list(prompts))]
    return cast("list[Prompt]", list(prompts))


def _listed_messages(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> list[Sequence[Message]]:
    """Several conversations as they are, one as a list of one."""
    if messages and isinstance(messages[0], Mapping):
        return [cast("Sequence[Message]", messages)]
    return list(cast("Sequence[Sequence[Message]]", messages))


def _progress_bar(total: int, shown: bool) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, disable=not shown, desc="Processed prompts", unit="prompt")
