"""The container file: what it says, and that its steps work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_container_takes_flags_after_the_image_name_and_runs_without_privileges() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["ingle", "serve", "--host", "0.0.0.0"]' in text
    assert "\nUSER ingle\n" in text
    assert "\nHEALTHCHECK " in text
    assert "\nEXPOSE 2242\n" in text


def test_the_container_holds_every_package() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for project in (*ROOT.glob("plugins/*/pyproject.toml"), ROOT / "server/pyproject.toml"):
        assert f"./{project.parent.relative_to(ROOT)}" in text


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_steps_of_the_container_file_work_and_its_entry_point_answers() -> None:
    command = [sys.executable, str(ROOT / "tools/container.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "The container file works." in done.stdout
