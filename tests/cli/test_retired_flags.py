"""Flags of vLLM and Aphrodite that Ingle accepts, and what it says about them."""

from __future__ import annotations

import pytest

from ingle.cli.arguments import prepare_arguments, settle_settings
from ingle.cli.flags import Command, make_command
from ingle.cli.lacking import LACKING
from ingle.cli.retired import RETIRED, SHORT_RETIRED
from ingle.config import EngineConfig
from ingle.errors import ConfigError


@pytest.fixture(scope="module")
def command() -> Command:
    """A subcommand with the engine's flags."""

    def record(engine: EngineConfig) -> None:
        """Nothing."""

    record.__annotations__["engine"] = EngineConfig
    return make_command("record", record)


@pytest.mark.parametrize("flag", sorted(RETIRED))
def test_every_retired_flag_is_taken_out_with_one_line(command: Command, flag: str) -> None:
    entry = RETIRED[flag]
    value = [(*entry.only, "4")[0]] if entry.takes_value else []
    arguments = prepare_arguments(command, ["model", flag, *value, "--seed", "1"])
    renamed = [f"{entry.becomes}={value[0]}"] if entry.becomes and value else []
    renamed = [entry.becomes] if entry.becomes and not value else renamed
    assert arguments.tokens == ["model", *renamed, "--seed", "1"]
    assert len(arguments.notices) == 1
    assert arguments.notices[0].startswith(f"{flag} is ")


def test_no_retired_flag_is_also_a_flag_of_the_engine(command: Command) -> None:
    assert command.flags & set(RETIRED) == set()
    assert {entry.becomes for entry in RETIRED.values()} - command.flags <= {
        "",
        "--allow-inline-model-loading",
        "--disable-access-log",
        "--log-level",
    }
    assert set(SHORT_RETIRED.values()) <= {*RETIRED, *LACKING}
    assert set(LACKING) & {*RETIRED, *command.flags} == set()


@pytest.mark.parametrize("flag", sorted(LACKING))
def test_every_flag_that_asks_for_what_is_lacking_is_refused_with_the_reason(
    command: Command, flag: str
) -> None:
    for argv in ([flag, "thing"], [f"{flag}=thing"], [flag.replace("-", "_").replace("__", "--")]):
        with pytest.raises(ConfigError) as caught:
            prepare_arguments(command, ["model", *argv])
        assert str(caught.value) == f"{flag} cannot be done: {LACKING[flag]}"
    with pytest.raises(ConfigError, match=flag):
        settle_settings(command, {flag.removeprefix("--"): "thing"})


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-lora", "false"],
        ["--no-enable-lora"],
        ["--enable_lora=False"],
        ["--kv-offloading-size", "0"],
        ["--speculative-config={}"],
    ],
)
def test_a_lacking_flag_that_asks_for_nothing_is_left_out_with_a_line(
    command: Command, argv: list[str]
) -> None:
    arguments = prepare_arguments(command, [*argv, "model"])
    assert arguments.tokens == ["model"]
    assert len(arguments.notices) == 1
    assert settle_settings(command, {"enable-lora": False})[0] == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["--enable-lora"],
        ["--lora-modules", "a=/b"],
        ["--speculative-config.model", "x"],
        ["-dcp", "2"],
    ],
)
def test_a_real_command_line_with_them_ends_with_the_reason(
    command: Command, argv: list[str]
) -> None:
    with pytest.raises(ConfigError, match="cannot be done"):
        prepare_arguments(command, argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--swap-space", "4"],
        ["--swap-space=4"],
        ["--swap_space", "4"],
        ["--enable-chunked-prefill"],
        ["--enable-chunked-prefill", "false"],
        ["--enable-chunked-prefill=true"],
        ["--no-enable-chunked-prefill"],
        ["-tp", "1"],
        ["--compilation-config.level", "3"],
    ],
)
def test_retired_flags_are_known_in_every_spelling(command: Command, argv: list[str]) -> None:
    arguments = prepare_arguments(command, [*argv, "model"])
    assert arguments.tokens == ["model"]
    assert len(arguments.notices) == 1


@pytest.mark.parametrize("argv", [["-tp", "2"], ["--load-format", "pt"], ["-pp=4"]])
def test_a_retired_flag_that_would_change_the_answer_is_refused(
    command: Command, argv: list[str]
) -> None:
    with pytest.raises(ConfigError, match="cannot be done"):
        prepare_arguments(command, argv)


def test_the_old_name_of_the_cache_size_passes_its_value_on(command: Command) -> None:
    arguments = prepare_arguments(command, ["--kv-cache-memory", "4GiB"])
    assert arguments.tokens == ["--kv-cache-memory-bytes=4GiB"]
    assert arguments.notices == ["--kv-cache-memory is called --kv-cache-memory-bytes here."]


def test_retired_keys_of_a_yaml_file_are_left_out_too(command: Command) -> None:
    settings = {"model": "m", "swap_space": 4, "kv-cache-memory": "1GiB", "max-num-seqs": 2}
    kept, notices = settle_settings(command, settings)
    assert kept == {"model": "m", "kv-cache-memory-bytes": "1GiB", "max-num-seqs": 2}
    assert len(notices) == 2
