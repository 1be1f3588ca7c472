"""Logits of a quant as a peer computes them: run by ``check_peers.py`` in the peer's environment.

    python peer_logits.py transformers|gptqmodel QUANT IDS.json OUT.safetensors

IDS.json holds rows of token ids; OUT gets ``logits`` float32 [rows, tokens, vocabulary]. The plain
linear of GPTQModel takes float16 and bfloat16 only. Imports nothing of Ingle.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def with_gptqmodel(folder: str) -> tuple[Any, str]:
    """The model through GPTQModel's own loader, and what computes its linears."""
    from gptqmodel import BACKEND, GPTQModel

    loaded = GPTQModel.load(folder, backend=BACKEND.TORCH, device="cpu", dtype=torch.float16)
    return loaded.model, _kernel(loaded.model)


def with_transformers(folder: str) -> tuple[Any, str]:
    """The model through transformers' own quantiser of that method."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    return model, _kernel(model)


LOADERS: dict[str, Callable[[str], tuple[Any, str]]] = {
    "gptqmodel": with_gptqmodel,
    "transformers": with_transformers,
}


def _kernel(model: Any) -> str:
    """The class of a linear; it must not be a dense one."""
    kind = type(model.model.layers[0].mlp.down_proj)
    return f"{kind.__module__}.{kind.__qualname__}"


def main() -> None:
    """Writes the logits."""
    peer, folder, ids, out = sys.argv[1:]
    model, kernel = LOADERS[peer](folder)
    rows = torch.tensor(json.loads(Path(ids).read_text()))
    with torch.inference_mode():
        logits = torch.cat([model(row[None]).logits.float() for row in rows])
    save_file({"logits": logits.contiguous()}, out, metadata={"kernel": kernel})


if __name__ == "__main__":
    main()
