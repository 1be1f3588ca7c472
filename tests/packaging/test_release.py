"""The release script, on a copy of this repository."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "tests", "site", "dist", "build"
)


def git(folder: Path, *words: str) -> str:
    name = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    line = ["git", *name, *words]
    return subprocess.run(line, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository's files, committed once."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Test")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "test@example.org")
    folder = shutil.copytree(ROOT, tmp_path / "copy", ignore=IGNORED, symlinks=True)
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Everything")
    return folder


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "tools/release.py"), *words, "--root", str(folder)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def projects(folder: Path) -> dict[str, dict[str, object]]:
    files = [folder / "core", folder / "server", *sorted((folder / "plugins").iterdir())]
    found = [tomllib.loads((file / "pyproject.toml").read_text())["project"] for file in files]
    return {project["name"]: project for project in found}


def test_one_command_stamps_and_tags_every_package(copy: Path) -> None:
    done = release(copy, "0.7.3", "--date", "2027-01-02")
    assert done.returncode == 0, done.stderr
    packages = projects(copy)
    assert len(packages) == 6
    for name, project in packages.items():
        assert project["version"] == "0.7.3"
        wanted = [r for r in map(str, project["dependencies"]) if r.startswith("ingle")]  # type: ignore[call-overload]
        assert all(r.endswith(">=0.7,<0.8") for r in wanted), (name, wanted)
    extra = packages["ingle"]["optional-dependencies"]["all"]  # type: ignore[index]
    assert all(requirement.endswith(">=0.7,<0.8") for requirement in extra)
    for file in copy.glob("**/src/*/__init__.py"):
        versions = re.findall(r'^__version__ = "(.*)"', file.read_text(), re.MULTILINE)
        assert versions in ([], ["0.7.3"])
    assert "## 0.7.3 (2027-01-02)" in (copy / "CHANGELOG.md").read_text()
    for name in ("Dockerfile", "compose.yaml", "README.md", "docs/install.md"):
        named = re.findall(r"\bingle:(\d+\.\d+\.\d+)", (copy / name).read_text())
        assert set(named) <= {"0.7.3"}, name
    assert 'image.version="0.7.3"' in (copy / "Dockerfile").read_text()
    assert set(git(copy, "tag").split()) == {"v0.7.3", *(f"{name}-0.7.3" for name in packages)}
    assert git(copy, "status", "--porcelain") == ""
    assert git(copy, "log", "-1", "--format=%s").strip() == "Release 0.7.3"


def test_what_cannot_be_released_changes_nothing(copy: Path) -> None:
    assert "no version" in release(copy, "1.0").stderr
    (copy / "README.md").write_text("changed")
    assert "not committed" in release(copy, "0.7.3").stderr
    git(copy, "checkout", "--quiet", "README.md")
    assert release(copy, "0.7.3").returncode == 0
    assert "was released" in release(copy, "0.7.3").stderr
    assert "nothing to release" in release(copy, "0.7.4").stderr
    assert git(copy, "log", "--format=%s").split("\n")[0] == "Release 0.7.3"


def test_a_check_says_what_would_be_stamped(copy: Path) -> None:
    done = release(copy, "0.7.3", "--check")
    assert done.returncode == 0, done.stderr
    assert "would stamp plugins/quant_awq/pyproject.toml" in done.stdout
    assert git(copy, "status", "--porcelain") == ""
    assert git(copy, "tag") == ""


def previous_plugins(folder: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "tools/previous_plugins.py"), "--root", str(folder)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_without_a_release_there_is_no_older_plugin_to_check(copy: Path) -> None:
    done = previous_plugins(copy)
    assert (done.returncode, done.stdout) == (0, "No plugin was released yet: nothing to check.\n")


@pytest.mark.slow
def test_the_last_release_of_each_plugin_is_tried_with_this_core(copy: Path) -> None:
    """A release whose plugin asks for a newer contract is noticed; one like today's is not."""
    assert release(copy, "0.7.3").returncode == 0
    done = previous_plugins(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" as released: ") == 4
    plugin = copy / "plugins/kv_fp8/src/ingle_kv_fp8/plugin.py"
    text = re.sub(r"INGLE_PLUGIN_API = .*", "INGLE_PLUGIN_API = (0, 99)", plugin.read_text())
    plugin.write_text(text)
    git(copy, "commit", "--all", "--quiet", "--message", "Ask for more")
    git(copy, "tag", "ingle-kv-fp8-0.7.4")
    done = previous_plugins(copy)
    assert "ingle-kv-fp8 as released: ingle-kv-fp8-0.7.4" in done.stdout
    assert done.returncode != 0
