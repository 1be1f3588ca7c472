"""``ingle serve`` as a process on what it must refuse or survive: one clear line, no traceback."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from live_server import environment, live_server, run

PACKAGES = Path(__file__).parents[1] / "registry" / "packages"


@pytest.fixture
def model(demo_model_dir: Path, tmp_path: Path) -> Path:
    """The demo model's folder, to be damaged; weights are links until a test replaces them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in demo_model_dir.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    return folder


def refused(tmp_path: Path, *arguments: str | Path, code: int = 1) -> str:
    """The complaint of a server that does not start: the last line, and no traceback."""
    flags = ("--port", "0", "--enforce-eager")
    done: subprocess.CompletedProcess[str] = run(
        tmp_path,
        ["serve", *arguments, *flags],
        environment(tmp_path / "site", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub")),
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    complaint = done.stderr.strip().splitlines()[-1]
    assert complaint.startswith("ingle: ")
    return complaint


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    shard = next(model.glob("*.safetensors"))
    whole = shard.resolve()
    shard.unlink()
    with whole.open("rb") as source:
        shard.write_bytes(source.read(1_000_000))
    assert shard.name in refused(tmp_path, model)


def test_a_missing_shard_is_refused_by_name(tmp_path: Path, model: Path) -> None:
    shard = next(model.glob("*.safetensors"))
    index = {"weight_map": {"model.norm.weight": shard.name, "x": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002.safetensors" in refused(tmp_path, model)


def test_a_pickle_is_refused_with_the_remedy(tmp_path: Path, model: Path) -> None:
    next(model.glob("*.safetensors")).unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04K*.")
    assert "save_pretrained" in refused(tmp_path, model)


def test_a_hub_id_without_network_is_told_so(tmp_path: Path) -> None:
    assert "org/name" in refused(tmp_path, "org/name")


@pytest.mark.parametrize("flags", [("--max-model-len", "0"), ("--bogus",), ("--dtype", "int7")])
def test_wrong_usage_is_one_line_that_names_the_flag(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    assert flags[0] in refused(tmp_path, *flags, code=2)


def test_code_beside_the_weights_is_never_run_and_broken_plugins_are_named(
    tmp_path: Path, model: Path
) -> None:
    """The server is started in the model's own folder, whose modules have familiar names."""
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_trap.Trap", "AutoConfig": "trap.Trap"}
    (model / "config.json").write_text(json.dumps(config))
    sprung = tmp_path / "sprung"
    for name in ("modeling_trap", "trap", "random"):
        (model / f"{name}.py").write_text(f"open({str(sprung)!r}, 'w')")
    site = tmp_path / "site"
    env = environment(site)
    for name in ("import_error", "raising_hook"):
        shutil.copy(PACKAGES / f"{name}.py", site / f"ingle_test_{name}.py")
        info = site / f"ingle_quant_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        points = f"[ingle.plugins]\n{name} = ingle_test_{name}\n"
        (info / "entry_points.txt").write_text(points)
    with live_server(tmp_path, model, "--enforce-eager", env=env) as server:
        body = {"model": "model", "prompt": "The capital of France is", "max_tokens": 2}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        plugins = server.http.get("/v1/plugins").text
        assert "import_error" in plugins
        assert "raising_hook" in plugins
        _a_signal_during_a_stream_ends_it(server.url, server.popen)
    assert not sprung.exists()


def _a_signal_during_a_stream_ends_it(url: str, process: subprocess.Popen[bytes]) -> None:
    body = {"model": "model", "prompt": "Once", "max_tokens": 8000, "stream": True}
    body["ignore_eos"] = True
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        pieces = response.iter_text()
        text = next(pieces)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        text += "".join(pieces)
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert process.wait(30) == 0


def test_a_port_in_use_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run(tmp_path, ["serve", "/no/such/model", "--port", port])
    assert done.returncode == 1
    assert "in use" in done.stderr
