"""From what the user typed after ``--model`` to a folder on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ingle.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Sequence

WANTED_FILES: Final[Sequence[str]] = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
)
UNWANTED_FILES: Final[Sequence[str]] = ("*/*", "consolidated*", "adapter_model*", "optimizer*")
"""Sub-folders (ONNX, the makers' own format) and second copies of the weights."""
_WANTED: Final = "the folder that config.json and *.safetensors lie in, or a hub id."
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*|[A-Za-z0-9][\w\-]*")


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The model's folder; a hub id is downloaded first, with a progress bar on a terminal.

    Only weights in safetensors, JSON and tokenizer files are fetched, never code. What is in
    huggingface_hub's cache already is not fetched again.

    Args:
        model: A folder, or a hub id such as ``Qwen/Qwen3-8B``.
        revision: Branch, tag or commit on the hub; None is the main branch.

    Raises:
        CheckpointError: When there is neither such a folder nor such a repository, when access
            is gated, or when the hub cannot be reached and the cache does not have it.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if model and folder.exists():
        raise CheckpointError(f"{model} is a file{_kind(folder)}; give {_WANTED}")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"There is no folder {model!r}, and it is no hub id such as Qwen/Qwen3-8B."
        )
    path = _download(model, revision)
    if not any(path.glob("*.safetensors")):
        raise CheckpointError(
            f"{model} has no .safetensors files on the hub, and other formats are not read. "
            "Look for a safetensors version of it, or convert it: "
            "https://huggingface.co/spaces/safetensors/convert"
        )
    return path


def _kind(file: Path) -> str:
    """What a file is that no folder of safetensors is, if its first bytes tell."""
    with file.open("rb") as stream:
        start = stream.read(4)
    if start == b"GGUF":
        return " in GGUF, llama.cpp's format, which is not read"
    return ""


def find_model(model: str, revision: str | None = None) -> Path:
    """The model's folder, if it is on this machine already; nothing is downloaded.

    Raises:
        CheckpointError: When it is neither a folder nor in the hub's cache here.
    """
    folder = Path(model).expanduser()
    if folder.exists() or not _HUB_ID.fullmatch(model):
        return resolve_model(model, revision)
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (errors.LocalEntryNotFoundError, errors.HFValidationError) as error:
        raise CheckpointError(
            f"{model} is no folder, and not in the hub's cache here; only headers are read, but "
            f"they have to be there. Download it first: hf download {model}"
        ) from error


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    at = f" at revision {revision!r}" if revision else ""
    try:
        path = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(WANTED_FILES),
            ignore_patterns=list(UNWANTED_FILES),
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated: accept its terms at https://huggingface.co/{model}, then log in "
            "with: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"There is no folder {model!r}, and the hub has no model of that name that you may "
            "read. Check the spelling; for a private model log in with: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{model} has no revision {revision!r} on the hub.") from error
    except errors.HFValidationError as error:
        raise CheckpointError(f"{model!r} is neither a folder nor a hub id: {error}") from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"The hub cannot be reached, and its cache here does not hold all of {model}{at}. "
            "Connect to the network, or give the folder of a model."
        ) from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"Downloading {model}{at} failed: {reason[0][:200] if reason else type(error).__name__}"
        ) from error
    return Path(path)
