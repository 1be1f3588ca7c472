"""Options of the engine that stand in place of what a model folder says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingle.checkpoint.chat_template import Conversation, load_chat_template
from ingle.checkpoint.template_source import read_template
from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.errors import CheckpointError, ConfigError
from ingle.llm import LLM

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
HI = Conversation(messages=[{"role": "user", "content": "hi"}])


def rendered(folder: Path, given: str) -> str:
    tokenizer = load_tokenizer(folder, read_template(given))
    return load_chat_template(folder, tokenizer).render(HI)


def test_a_chat_template_is_given_as_text_or_as_a_file(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(TEMPLATE)
    assert rendered(demo_model_dir, TEMPLATE) == "<user>hi"
    assert rendered(demo_model_dir, str(file)) == "<user>hi"


def test_a_chat_template_that_is_neither_is_refused(demo_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"--chat-template.*no file 'mine\.jinja'"):
        read_template("mine.jinja")
    with pytest.raises(CheckpointError, match="fault"):
        rendered(demo_model_dir, "{% for m in messages %}")


@pytest.fixture
def eager_folder(demo_model_dir: Path, tmp_path: Path) -> Path:
    """The demo model with sampling defaults of its own, and another end of sequence."""
    for file in demo_model_dir.iterdir():
        if file.name != "generation_config.json" and file.is_file():
            (tmp_path / file.name).symlink_to(file)
    values = {"temperature": 0.3, "top_k": 7, "top_p": 0.5, "eos_token_id": [2, 17]}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(("option", "top_k"), [("auto", 7), ("ingle", 0), ("vllm", 0)])
def test_sampling_defaults_of_a_model_can_be_ignored(
    eager_folder: Path, option: Any, top_k: int
) -> None:
    llm = LLM(
        str(eager_folder),
        device="cpu",
        generation_config=option,
        chat_template=TEMPLATE,
        max_model_len=64,
        enforce_eager=True,
    )
    params = llm.get_default_sampling_params()
    assert (params.top_k, params.temperature) == (top_k, 0.3 if top_k else 1.0)
    assert {2, 17} <= set(llm._core.info.eos_token_ids)
    assert llm._template.render(HI) == "<user>hi"
