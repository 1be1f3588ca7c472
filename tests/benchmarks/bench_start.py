"""How long a start takes: to the demo model's first token, and per gigabyte of a big checkpoint.

    make bench-start
    python tests/benchmarks/bench_start.py [--repeats 3] [--gigabytes 4]

A start is a new process, from its first instruction to the first token: `ingle generate`, and
`ingle serve` with a chat streamed over HTTP. The checkpoint is written to the temporary folder,
loaded by a new process while it lies in the page cache, and removed.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ingle.bench.streams import Address, stream
from ingle.demo_model import default_demo_model
from ingle.errors import IngleError
from ingle.plugin.cache_folder import default_cache_folder

RUN = "import sys; from ingle.cli import main; sys.exit(main(sys.argv[1:]))"
LOAD = """
import sys
from ingle import EngineConfig
from ingle.engine.engine import build_engine_core
core = build_engine_core(EngineConfig(model=sys.argv[1], max_model_len=256, enforce_eager=True))
print(core.info.load_report)
"""
HIDDEN, INNER, VOCABULARY = 2048, 8192, 32768
LAYER_BYTES = 2 * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 512 + 3 * HIDDEN * INNER)


def generated(model: str) -> float:
    """Seconds until `ingle generate` has answered with one token."""
    begun = time.perf_counter()
    line = [sys.executable, "-c", RUN, "generate", model, "Hello", "--max-tokens", "1"]
    subprocess.run(line, check=True, capture_output=True)
    return time.perf_counter() - begun


def served(model: str) -> float:
    """Seconds from the start of `ingle serve` to the first streamed token of a chat."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    address = Address(host="127.0.0.1", port=port, path="/v1/chat/completions")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": "demo", "messages": question, "stream": True, "max_tokens": 2}
    line = [sys.executable, "-c", RUN, "serve", model, "--port", str(port)]
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*line, "--served-model-name", "demo"], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            while True:
                try:
                    return stream(address, body, 2).last - begun
                except (OSError, IngleError):
                    if process.poll() is not None:
                        raise SystemExit("The server did not come up.") from None
                    time.sleep(0.02)
        finally:
            process.terminate()
            process.wait()


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """A dense Llama of random bytes that are harmless numbers, of about so many 10^9 bytes."""
    import torch
    from safetensors.torch import save_file

    demo = default_demo_model(default_cache_folder())
    layers = max(1, round((gigabytes * 1e9 - 2 * HIDDEN * VOCABULARY) / LAYER_BYTES))
    config = json.loads((demo / "config.json").read_text()) | {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
    }
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo / name).read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    noise = (torch.rand(HIDDEN * INNER) * 0.02).to(torch.bfloat16)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return noise[: rows * columns].view(rows, columns).clone()

    tensors = {
        "model.embed_tokens.weight": noise.repeat(4).view(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
    }
    sizes = {"q": (2048, HIDDEN), "k": (512, HIDDEN), "v": (512, HIDDEN), "o": (HIDDEN, 2048)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, size in sizes.items():
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = weight(*size)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = weight(INNER, HIDDEN)
        tensors[f"{prefix}mlp.down_proj.weight"] = weight(HIDDEN, INNER)
        for name in ("input", "post_attention"):
            tensors[f"{prefix}{name}_layernorm.weight"] = torch.ones(HIDDEN).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def loaded(folder: Path) -> str:
    """What a process that loads ``folder`` says of it, the file being in the page cache."""
    with (folder / "model.safetensors").open("rb") as file:
        while file.read(1 << 26):
            pass
    line = [sys.executable, "-c", LOAD, str(folder)]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def show(what: str, measure: Callable[[], float], repeats: int) -> None:
    """Prints median, lowest and highest."""
    measure()
    values = [measure() for _ in range(repeats)]
    print(f"{what}: {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")


def main() -> None:
    """Prints a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    options = parser.parse_args()
    demo = str(default_demo_model(default_cache_folder()))
    show("ingle generate, one token", lambda: generated(demo), options.repeats)
    show("ingle serve, first streamed token", lambda: served(demo), options.repeats)
    if options.gigabytes:
        with tempfile.TemporaryDirectory(prefix="ingle-checkpoint-") as folder:
            write_checkpoint(Path(folder), options.gigabytes)
            for _ in range(options.repeats):
                print(loaded(Path(folder)))


if __name__ == "__main__":
    main()
