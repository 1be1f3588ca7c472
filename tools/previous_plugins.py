"""Does the last release of every plugin still work with this core?

Takes the newest tag ``PACKAGE-VERSION`` of each plugin (tools/release.py makes them), installs the
package as it was then into a folder of its own, and starts this checkout's core with them: ``ingle
plugins --strict-plugins``, then ``ingle plugins check`` for each. Without tags there is nothing to
check, and it says so. ``--root FOLDER`` is the repository with the tags.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def last_releases(root: Path) -> dict[str, tuple[str, str]]:
    """Folder of each plugin that was released -> (package, its newest tag)."""
    found = {}
    for folder in sorted((root / "plugins").iterdir()):
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
        (name,) = re.findall(r'^name = "([^"]+)"', text, re.MULTILINE)[:1]
        listed = ["git", "tag", "--list", f"{name}-[0-9]*", "--sort=-version:refname"]
        tags = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout
        if tags.split():
            found[f"plugins/{folder.name}"] = (name, tags.split()[0])
    return found


def unpack(root: Path, tag: str, folder: str, target: Path) -> Path:
    """The plugin's folder as it was at its release."""
    words = ["git", "archive", "--format=tar", tag, folder]
    data = subprocess.run(words, cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(target, filter="data")
    return target / folder


def install(package: Path, site: Path) -> None:
    """Installs it, and nothing that it asks for: that is this checkout's to bring."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(package)], check=True)


def check(site: Path, names: list[str]) -> int:
    """Starts core with the packages; the first exit code that is not 0."""
    path = [str(site), str(ROOT / "core/src"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    commands = [["plugins", "--strict-plugins"], *(["plugins", "check", name] for name in names)]
    for words in commands:
        print(f"RUN  ingle {' '.join(words)}", flush=True)
        line = [sys.executable, "-P", "-m", "ingle", *words]
        code = subprocess.run(line, env=env, check=False).returncode
        if code:
            return code
    return 0


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository with the tags")
    root: Path = parser.parse_args().root
    releases = last_releases(root)
    if not releases:
        print("No plugin was released yet: nothing to check.")
        return 0
    with tempfile.TemporaryDirectory(prefix="ingle-previous-") as place:
        for folder, (name, tag) in releases.items():
            print(f"{name} as released: {tag}", flush=True)
            install(unpack(root, tag, folder, Path(place, name)), Path(place, "site"))
        return check(Path(place, "site"), [name for name, _ in releases.values()])


if __name__ == "__main__":
    sys.exit(main())
