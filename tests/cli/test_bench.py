"""``ingle bench``: figures of this engine, and of stand-ins for the others."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from ingle.bench.figure import Figure
from ingle.bench.peer import PausedProcess
from ingle.bench.streams import Stamps, tokens_per_second
from ingle.bench.workload import Workload
from ingle.cli import main
from ingle.config import EngineConfig
from ingle.errors import ConfigError

ARGV = ["bench", "demo", "--prompt-tokens", "24", "--output-tokens", "4", "--prefill-tokens", "32"]

LLAMA_BENCH = """#!{python}
import json, sys
flag = sys.argv.index
depth = "-d" in sys.argv
assert sys.argv[flag("-m") + 1].endswith("same.gguf")
if depth:
    assert sys.argv[flag("-n") + 1] == "4" and sys.argv[flag("-d") + 1] == "24"
else:
    assert sys.argv[flag("-p") + 1] == "32"
print(json.dumps([{{"avg_ts": 2.0 if depth else 8.0}}]))
"""

LLAMA_SERVER = """#!{python}
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert len(body["prompt"]) == 24 and body["ignore_eos"] and not body["cache_prompt"]
        self.send_response(200)
        self.end_headers()
        for number in range(body["n_predict"]):
            self.wfile.write(b'data: {{"content": "a"}}\\n\\n')
            self.wfile.flush()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

VLLM = """
class SamplingParams:
    def __init__(self, **values):
        assert values["ignore_eos"]
        self.max_tokens = values["max_tokens"]
class One:
    token_ids = [1]
class Output:
    def __init__(self, name):
        self.request_id, self.outputs = name, [One()]
class Engine:
    left = {}
    def add_request(self, name, prompt, params):
        self.left[name] = params.max_tokens
    def has_unfinished_requests(self):
        return bool(self.left)
    def step(self):
        outputs = [Output(name) for name in self.left]
        for name in list(self.left):
            self.left[name] -= 1
            if not self.left[name]:
                del self.left[name]
        return outputs
class LLM:
    def __init__(self, model, **values):
        print("loading", model)
        self.llm_engine = Engine()
"""


def program(path: Path, text: str) -> None:
    """Writes a Python script that can be run."""
    path.write_text(text.format(python=sys.executable))
    path.chmod(0o755)


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    """A folder with stand-ins for llama.cpp's programs, and a model file."""
    program(tmp_path / "llama-bench", LLAMA_BENCH)
    program(tmp_path / "llama-server", LLAMA_SERVER)
    (tmp_path / "same.gguf").touch()
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """What ``ingle bench --json`` prints."""
    assert main([*ARGV, "--json", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_bench_reports_every_figure_as_json(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, "--repeats", "2", "--batch", "1,3")
    for name in (
        "decode_tokens_per_second",
        "prefill_tokens_per_second",
        "time_to_first_token_seconds",
        "time_to_first_token_cached_seconds",
    ):
        lowest, middle, highest = (found[f"{name}{end}"] for end in ("_min", "", "_max"))
        assert 0 < lowest <= middle <= highest
    assert [row["batch"] for row in found["decode"]] == [1, 3]
    assert found["decode"][0]["tokens_per_second"] == found["decode_tokens_per_second"]
    assert (found["prompt_tokens"], found["output_tokens"], found["repeats"]) == (24, 4, 2)
    assert found["prefill_tokens"] == 32
    assert found["startup_seconds"] <= found["startup_to_first_token_seconds"]
    assert found["resident_memory_bytes"] <= found["peak_memory_bytes"]


def test_bench_prints_a_table_and_draws_a_picture(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plot = tmp_path / "speed.svg"
    assert main([*ARGV, "--repeats", "1", "--batch", "1,2", "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    assert "decode, batch 2, tokens per second" in out
    assert "time to first token, prefix cached" in out
    texts = [element.text for element in ElementTree.parse(plot).iter()]
    assert {"decode, batch 1", "decode, batch 2", "prefill, 32 tokens"} <= set(texts)


def test_bench_measures_only_batches_that_the_engine_runs_together(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, "--repeats", "1", "--batch", "2,1000")
    assert [row["batch"] for row in found["decode"]] == [1, 2]


def test_bench_alternates_with_llama_cpp_and_gives_the_ratios(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str], llama_folder: Path
) -> None:
    argv = ["--compare", f"llama.cpp={llama_folder}", "--batch", "2", "--repeats", "2"]
    found = report(capsys, *argv, "--compare-model", str(llama_folder / "same.gguf"))
    peer = found["compare"]["llama.cpp"]
    assert set(peer) == {"startup_seconds", "decode_batch_1", "decode_batch_2", "prefill"}
    one = peer["decode_batch_1"]
    assert one["peer_tokens_per_second"] == 2.0
    assert one["ratio_min"] <= one["ratio"] <= one["ratio_max"]
    assert one["ratio"] == pytest.approx(one["ingle_tokens_per_second"] / 2.0)
    assert peer["prefill"]["peer_tokens_per_second"] == 8.0


def test_bench_alternates_with_vllm_in_its_own_interpreter(
    demo_commands: list[EngineConfig],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(VLLM)
    (tmp_path / "vllm/sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    argv = ["--compare", f"vllm={sys.executable}", "--batch", "2", "--repeats", "1"]
    peer = report(capsys, *argv)["compare"]["vllm"]
    assert set(peer) == {"startup_seconds", "decode_batch_1", "decode_batch_2", "prefill"}
    assert peer["decode_batch_2"]["peer_tokens_per_second"] > 0


def test_a_peer_that_ends_is_quoted(
    demo_commands: list[EngineConfig],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "vllm.py").write_text("raise SystemExit('no such wheel')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main([*ARGV, "--compare", f"vllm={sys.executable}"]) == 2
    assert "no such wheel" in capsys.readouterr().err


def test_a_peer_rests_while_it_is_not_measured(tmp_path: Path) -> None:
    def state() -> str:
        stat = Path(f"/proc/{peer.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    line = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    peer = PausedProcess(line, "peer", tmp_path / "log", talks=True)
    assert peer.process.stdout is not None
    with peer:
        peer.process.stdout.readline()
        assert state() == "R"
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)
    assert state() == "T"
    peer.close()
    assert peer.process.returncode is not None


def test_the_rates_of_streams_add_up() -> None:
    one = Stamps(first=1.0, last=2.0, num_tokens=11)
    other = Stamps(first=1.5, last=3.5, num_tokens=11)
    assert tokens_per_second([one, other]) == 15


def test_ratios_are_of_pairs() -> None:
    ratio = Figure.of([10, 30, 20]).over(Figure.of([10, 10, 10]))
    assert (ratio.lowest, ratio.median, ratio.highest) == (1, 2, 3)


@pytest.mark.parametrize(
    "argv",
    [
        ["--prompt-tokens", "0"],
        ["--output-tokens", "0"],
        ["--repeats", "0"],
        ["--prefill-tokens", "0"],
        ["--batch", "1,x"],
        ["--compare", "sglang=/"],
        ["--compare", "llama.cpp=/no/such/folder"],
        ["--plot", "speed.png"],
    ],
)
def test_bench_refuses_what_measures_nothing(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    assert main(["bench", "demo", *argv]) == 2
    assert argv[0] in capsys.readouterr().err


def test_llama_cpp_needs_the_same_weights(
    demo_commands: list[EngineConfig], capsys: pytest.CaptureFixture[str], llama_folder: Path
) -> None:
    assert main([*ARGV, "--compare", f"llama.cpp={llama_folder}"]) == 2
    assert "--compare-model FILE.gguf" in capsys.readouterr().err


def test_the_batch_of_one_is_always_measured() -> None:
    assert Workload(batch="16,4").batches == (1, 4, 16)
    with pytest.raises(ConfigError, match="--batch"):
        Workload(batch="0")
