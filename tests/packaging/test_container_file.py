"""The container file: what it says, and that its steps work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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


def test_the_image_says_what_it_is() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for label in ("title", "description", "version", "licenses"):
        assert f"org.opencontainers.image.{label}=" in text


def test_the_compose_file_has_both_variants() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert services["cpu"]["build"]["args"] == {"VARIANT": "cpu"}
    for service in services.values():
        assert re.fullmatch(r"ingle:\d+\.\d+\.\d+(-cpu)?", service["image"])
        assert service["ports"] == ["127.0.0.1:2242:2242"]
        assert service["restart"] == "on-failure"


BASE_MB = 130
"""python:3.12-slim-bookworm, where the steps run without it."""
TORCH = "TORCH_INDEX=https://pypi.org/simple"
"""torch's own index is out of reach here; what pip finds is the CPU build for both variants."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", ["cuda", pytest.param("cpu", marks=pytest.mark.long)])
def test_the_steps_of_the_container_file_work_and_its_entry_point_answers(variant: str) -> None:
    """The small variant in an empty Debian, where one can be made, and held to its size."""
    command = [sys.executable, str(ROOT / "tools/container.py")]
    command += ["--build-arg", f"VARIANT={variant}", "--build-arg", TORCH]
    if variant == "cpu" and os.getuid() == 0 and shutil.which("debootstrap"):
        command.append("--debootstrap")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "The container file works." in done.stdout
    sizes = dict(re.findall(r"^SIZE (\S+) ([\d,]+) MB", done.stdout, re.MULTILINE))
    mine = int(sizes["/opt/ingle"].replace(",", ""))
    if variant == "cpu":
        assert mine + BASE_MB < 1300
        assert int(sizes.get("image", "0").replace(",", "")) < 1300
