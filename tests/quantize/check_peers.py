"""Whether other engines read Ingle's quants and compute the same: `make check-peers`.

    python tests/quantize/check_peers.py [--peers PYTHON] [--work FOLDER] [QUANT ...]

Each AWQ or GPTQ folder is read by Ingle in float32, by a reader written from the formats'
description alone (its weights in transformers' dense model), and by transformers and GPTQModel,
which run in the environment of --peers. Without folders, those that `make bench-quants` left are
read. Prints how far the logits are apart, relative to the spread of Ingle's; fails above a bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from packed_reader import dense_state
from safetensors import safe_open

from ingle.checkpoint.tokenizer import load_tokenizer
from ingle.plugin.cache_folder import default_cache_folder
from ingle.quantize.evaluation import EvaluationConfig
from ingle.quantize.teacher_forcing import load_forced

BOUNDS = {"description": 1e-4, "transformers": 3e-2, "gptqmodel": 1e-2}
"""Root mean square of the difference over the standard deviation. The description's weights leave
the rounding of float32; GPTQModel's plain linear that of float16. What transformers picks on a CPU
(TorchAtenLinear) rounds scales and inputs to bfloat16, and the demo model's logits in bfloat16 are
2e-2 from those in float32 (docs/benchmarks.md)."""
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. Both are old cities.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + ",
    "Water boils at one hundred degrees Celsius at sea level; on a mountain it boils sooner.",
)
PEERS = ("transformers", "gptqmodel")


def main() -> int:
    """Prints a line per quant and reader; 0 when all agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("quants", nargs="*", type=Path)
    parser.add_argument("--peers", type=Path, help="a Python that has gptqmodel and optimum")
    parser.add_argument("--work", type=Path)
    arguments = parser.parse_args()
    work = arguments.work or default_cache_folder() / "quants" / "bench"
    quants = arguments.quants or _packed(work)
    if not quants:
        print(f"No AWQ or GPTQ folder in {work}: run make bench-quants, or name one.")
        return 2
    agreed = [_check(quant, arguments.peers) for quant in quants]
    return 0 if all(agreed) else 1


def _packed(work: Path) -> list[Path]:
    names = sorted(file.parent for file in work.glob("*/config.json"))
    return [f for f in names if f.name.startswith(("awq", "gptq")) and "rtn" not in f.name]


def _check(quant: Path, peers: Path | None) -> bool:
    tokenizer = load_tokenizer(str(quant))
    length = 16
    rows = [tokenizer.encode(text)[:length] for text in TEXTS]
    ours = _ingle(quant, rows)
    readers: dict[str, tuple[torch.Tensor, str]] = {
        "description": (_described(quant, rows), "packed_reader.py")
    }
    for peer in PEERS if peers is not None else ():
        readers[peer] = _peer(peers, peer, quant, rows)  # type: ignore[arg-type]
    good = True
    for name, (logits, how) in readers.items():
        apart = float((logits - ours).square().mean().sqrt() / ours.std())
        same = float((logits.argmax(-1) == ours.argmax(-1)).float().mean())
        agrees = apart <= BOUNDS[name]
        good = good and agrees
        verdict = "agrees" if agrees else "DIFFERS"
        print(f"{quant.name}: {name} {verdict}: {apart:.1e}, top-1 {same:.1%} ({how})", flush=True)
    return good


def _ingle(quant: Path, rows: list[list[int]]) -> torch.Tensor:
    """Logits of Ingle's engine, in float32: [rows, tokens, vocabulary]."""
    forced = load_forced(EvaluationConfig(dtype="float32", window=64), str(quant), "auto")
    try:
        forced.read(rows)
        return forced.logits(torch.arange(sum(map(len, rows)))).view(len(rows), len(rows[0]), -1)
    finally:
        forced.close()


def _described(quant: Path, rows: list[list[int]]) -> torch.Tensor:
    """Logits of transformers' dense model with the weights the description gives."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(quant)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(dense_state(quant), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    with torch.inference_mode():
        found: Any = model(torch.tensor(rows)).logits
    return torch.as_tensor(found)


def _peer(python: Path, peer: str, quant: Path, rows: list[list[int]]) -> tuple[torch.Tensor, str]:
    """Logits of a peer in a process of its environment, and the class of its linears."""
    with tempfile.TemporaryDirectory() as folder:
        ids, out = Path(folder) / "ids.json", Path(folder) / "logits.safetensors"
        ids.write_text(json.dumps(rows))
        script = Path(__file__).with_name("peer_logits.py")
        subprocess.run(
            [str(python), str(script), peer, str(quant), str(ids), str(out)],
            check=True,
            stdout=sys.stderr,
        )
        with safe_open(out, framework="pt") as opened:
            return opened.get_tensor("logits"), opened.metadata()["kernel"]


if __name__ == "__main__":
    sys.exit(main())
