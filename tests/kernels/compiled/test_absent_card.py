"""A model's kernels compiled for a card that is not here, as the engine will launch them there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ingle.attention.paged_kernel import paged_attention_kernel
from ingle.attention.paged_write import rotate_and_write_kernel
from ingle.builtin.affine_triton import default_w4_config, matmul_w4, pack_w4, w4_decode_kernel
from ingle.cli.compile import compile_kernels
from ingle.config import EngineConfig
from ingle.engine.absent_card import Compiled, find_card, pretending
from ingle.errors import ConfigError

pytestmark = pytest.mark.usefixtures("installed_plugins")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, with nothing in it on disk or in memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    forget()
    return tmp_path / "triton"


def forget() -> None:
    for kernel in (w4_decode_kernel, paged_attention_kernel, rotate_and_write_kernel):
        kernel.device_caches.clear()


@pytest.mark.parametrize(
    ("asked", "capability", "count"),
    [("rtx 4090", (8, 9), 128), ("sm_120:170", (12, 0), 170), ("A100", (8, 0), 108)],
)
def test_a_card_is_found_by_name_or_by_its_numbers(
    asked: str, capability: tuple[int, int], count: int
) -> None:
    card = find_card(asked)
    assert (card.capability, card.multi_processors) == (capability, count)
    assert (card.type, card.torch_device, card.is_absent) == ("cuda", "cpu", True)


@pytest.mark.parametrize("asked", ["RTX 9999", "sm_89", "", "89:128"])
def test_an_unknown_card_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError, match="sm_89:128"):
        find_card(asked)


def test_a_launch_compiles_with_assembly_and_leaves_no_trace() -> None:
    packed = pack_w4(torch.randint(0, 16, (64, 128)), torch.ones(1, 64).half(), None, 128)
    x, out = torch.ones(2, 128).half(), torch.zeros(2, 64).half()
    launch, before, found = JITFunction.run, driver._active, Compiled()
    for number in range(2):
        with pretending(find_card("RTX 3090"), found):
            assert x.is_cuda
            matmul_w4(x, packed, default_w4_config(packed, 82), out=out)
        assert (found.num_compiled, found.num_found) == (1, number)
        ((kernels, *_),) = w4_decode_kernel.device_caches.values()
        (kernel,) = kernels.values()
        assert "lop3" in kernel.asm["ptx"]  # the inline assembly that a card is given
        assert ".target sm_86" in kernel.asm["ptx"]
        forget()
    assert not x.is_cuda
    assert (out == 0).all()
    assert JITFunction.run is launch
    assert driver._active is before
    assert knobs.compilation.listener is None


@pytest.mark.slow
def test_a_model_is_compiled_once_with_everything_that_its_engine_chooses_on_the_card(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = EngineConfig(
        model=str(checkpoint),
        dtype="bfloat16",
        kv_cache_dtype="fp8",
        max_num_seqs=16,
        strict_plugins=True,
    )
    said = []
    for _ in range(2):
        compile_kernels(config, card="RTX 4090")
        said.append(capsys.readouterr().out)
        assert "gathers keys" not in caplog.text
        assert not list((tmp_path / "cache").rglob("*.json"))  # nothing was measured
        forget()
    number = int(said[0].split()[0])
    assert number > 8
    assert said[0].startswith(f"{number} kernels compiled for RTX 4090 in ")
    assert said[1].startswith("0 kernels compiled for RTX 4090 in ")
    assert f"; {number} were there." in said[1]


@pytest.mark.slow
def test_every_launch_that_measuring_on_the_card_tries_is_compiled(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(model=str(checkpoint), dtype="float16", max_num_seqs=1)
    numbers = []
    for every_launch in (False, True, True):
        compile_kernels(config, card="RTX 4090", every_launch=every_launch)
        numbers.append(int(capsys.readouterr().out.split()[0]))
        forget()
    assert numbers[0] > 8
    assert numbers[1] >= 10  # for attention alone there are 3 tiles, each with 32 and 64 splits
    assert numbers[2] == 0
    assert not list((tmp_path / "cache" / "launches").rglob("*"))  # nothing was measured


@pytest.mark.slow
def test_a_small_model_that_guesses_is_compiled_too(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    for path in checkpoint.iterdir():
        (small / path.name).write_bytes(path.read_bytes())
    options = {"dtype": "float16", "max_num_seqs": 1}
    config = EngineConfig(model=str(checkpoint), speculative_model=str(small), **options)
    compile_kernels(config, card="RTX 4090")
    assert int(capsys.readouterr().out.split()[0]) > 8
    forget()
    compile_kernels(EngineConfig(model=str(small), **options), card="RTX 4090")
    assert capsys.readouterr().out.startswith("0 kernels compiled for RTX 4090 in ")


def test_every_launch_is_for_a_card_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="--every-launch is for --card"):
        compile_kernels(EngineConfig(model="demo"), every_launch=True)
