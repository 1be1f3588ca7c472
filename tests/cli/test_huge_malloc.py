"""The command starts again with a malloc that asks for huge pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ingle.cli.huge_malloc import ASKED, TUNABLE, VARIABLE, changed_environment

GLIBC = "glibc 2.36"


def test_commands_that_run_a_model_ask_for_huge_pages() -> None:
    found = changed_environment(["serve", "/models/m"], {"HOME": "/root"}, GLIBC)
    assert found == {"HOME": "/root", VARIABLE: ASKED}


def test_other_tunables_stay() -> None:
    found = changed_environment(["bench"], {VARIABLE: "glibc.malloc.check=1"}, GLIBC)
    assert found == {VARIABLE: f"glibc.malloc.check=1:{ASKED}"}


@pytest.mark.parametrize(
    ("argv", "environment", "libc"),
    [
        pytest.param(["fit", "/models/m"], {}, GLIBC, id="nothing-is-run"),
        pytest.param([], {}, GLIBC, id="no-command"),
        pytest.param(["serve"], {VARIABLE: ASKED}, GLIBC, id="set-already"),
        pytest.param(["serve"], {VARIABLE: f"{TUNABLE}=0"}, GLIBC, id="refused-by-the-user"),
        pytest.param(["serve"], {}, "glibc 2.31", id="an-old-library"),
        pytest.param(["serve"], {}, None, id="musl"),
    ],
)
def test_what_gains_nothing_goes_on(
    argv: list[str], environment: dict[str, str], libc: str | None
) -> None:
    assert changed_environment(argv, environment, libc) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's C library")
def test_a_restart_keeps_process_and_arguments() -> None:
    program = (
        "import os, sys\n"
        "from ingle.cli import huge_malloc\n"
        "sys.argv = ['ingle', 'serve', *sys.argv[1:]]\n"
        "print(os.getpid(), os.environ.get('GLIBC_TUNABLES', ''), sys.argv[2:], flush=True)\n"
        "huge_malloc.restart_with_huge_pages()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program, "a b", "--flag"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    before, after = done.stdout.splitlines()
    number = before.split()[0]
    assert before == f"{number}  ['a b', '--flag']"
    assert after == f"{number} {ASKED} ['a b', '--flag']"
