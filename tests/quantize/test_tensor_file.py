"""Files a quant is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingle.quantize.tensor_file import write_tensors


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o775, 0o664), (0o700, 0o600)])
def test_whoever_may_read_the_folder_may_read_the_file(
    folder: int, file: int, tmp_path: Path
) -> None:
    tmp_path.chmod(folder)
    write_tensors(tmp_path / "model.safetensors", {"w": torch.zeros(2)})
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == file
