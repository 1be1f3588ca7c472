"""Releases every package together: release.py VERSION [--date YYYY-MM-DD] [--check].

Stamps the version wherever it stands and the changelog's date, commits, and tags: ``vVERSION`` for
all, and ``PACKAGE-VERSION`` for each package. Nothing is pushed or uploaded. ``--check`` only says
what it would change.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMPED = (
    "core/pyproject.toml",
    "server/pyproject.toml",
    "plugins/*/pyproject.toml",
    "*/src/*/__init__.py",
    "plugins/*/src/*/__init__.py",
    "Dockerfile",
    "compose.yaml",
    "README.md",
    "docs/install.md",
    "docs/quick_start.md",
)
RULES = (
    # A package's own version, in its metadata and in its source.
    (r'^version = "[^"]+"', 'version = "{version}"'),
    (r'^__version__ = "[^"]+"', '__version__ = "{version}"'),
    # What our packages ask of each other: anything of the same minor version.
    (r'"(ingle[a-z0-9-]*)>=[\d.]+,<[\d.]+"', r'"\1>={minor},<{next_minor}"'),
    # The container's tag and label.
    (r"\bingle:\d+\.\d+\.\d+(-cpu)?\b", r"ingle:{version}\1"),
    (r'(image\.version=)"[^"]+"', r'\1"{version}"'),
)
UNRELEASED = re.compile(r"^## (?:\S+ \(unreleased\)|Unreleased)$", re.MULTILINE | re.IGNORECASE)


class ReleaseError(Exception):
    """Why nothing was released."""


def stamped(text: str, version: str) -> str:
    """``text`` with every version in it that is ours replaced."""
    major, minor, _ = map(int, version.split("."))
    words = {
        "version": version,
        "minor": f"{major}.{minor}",
        "next_minor": f"{major}.{minor + 1}",
    }
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement.format(**words), text, flags=re.MULTILINE)
    return text


def changes(root: Path, version: str, date: str) -> Iterator[tuple[Path, str]]:
    """Every file that becomes another, with its new text.

    Raises:
        ReleaseError: The changelog has nothing that is unreleased.
    """
    log = root / "CHANGELOG.md"
    text = log.read_text(encoding="utf-8")
    if not UNRELEASED.search(text):
        raise ReleaseError("CHANGELOG.md has no heading that says unreleased: nothing to release.")
    yield log, UNRELEASED.sub(f"## {version} ({date})", text, count=1)
    for pattern in STAMPED:
        for path in sorted(root.glob(pattern)):
            before = path.read_text(encoding="utf-8")
            after = stamped(before, version)
            if after != before:
                yield path, after


def tags(root: Path, version: str) -> list[str]:
    """``v0.1.0``, and one for each package."""
    names = []
    for pattern in ("core", "server", "plugins/*"):
        for folder in sorted(root.glob(pattern)):
            text = (folder / "pyproject.toml").read_text(encoding="utf-8")
            names += re.findall(r'^name = "([^"]+)"', text, re.MULTILINE)[:1]
    return [f"v{version}", *(f"{name}-{version}" for name in names)]


def git(root: Path, *words: str) -> str:
    """Runs git and gives what it prints.

    Raises:
        ReleaseError: git refused.
    """
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {words[0]}: {done.stderr.strip()}")
    return done.stdout


def check(root: Path, version: str) -> None:
    """Refuses what could not be undone.

    Raises:
        ReleaseError: The version is none, was released, or the tree is not clean.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ReleaseError(f"{version!r} is no version such as 0.2.0.")
    if git(root, "status", "--porcelain").strip():
        raise ReleaseError("The tree has changes that are not committed.")
    taken = set(git(root, "tag").split())
    released = [tag for tag in tags(root, version) if tag in taken]
    if released:
        raise ReleaseError(f"{released[0]} exists: {version} was released.")


def release(root: Path, version: str, date: str) -> None:
    """Stamps, commits and tags.

    Raises:
        ReleaseError: See ``check``; nothing was changed then.
    """
    check(root, version)
    for path, text in list(changes(root, version, date)):
        path.write_text(text, encoding="utf-8")
    git(root, "commit", "--all", "--message", f"Release {version}")
    for tag in tags(root, version):
        git(root, "tag", "--annotate", tag, "--message", f"Release {version}")


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    try:
        if options.check:
            check(options.root, options.version)
            for path, _ in changes(options.root, options.version, options.date):
                print(f"would stamp {path.relative_to(options.root)}")
        else:
            release(options.root, options.version, options.date)
        print("\n".join(tags(options.root, options.version)))
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
