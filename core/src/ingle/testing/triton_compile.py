"""Compiles Triton kernels ahead of time, without a GPU or a driver, and reports what they cost.

Per target: registers, spilled bytes, shared memory, an estimate of occupancy, and counts of the
instructions in the final machine code. Triton's wheel brings ptxas and nvdisasm, so nothing else is
needed. The process must not have ``TRITON_INTERPRET`` set: with it, ``@triton.jit`` makes
interpreter functions, and nothing can be compiled.

    report = compile_kernel(kernel, "x=*fp16:16, n=i32", {"BLOCK": 64}, arch=86, num_warps=4)
    assert report.spill_bytes == 0

A signature entry is ``name=type[:16]``. ``:16`` says that a pointer or an integer is divisible by
16, which the just-in-time compiler finds out by itself; without it, loads are not vectorised.
``name=None`` makes an argument the constant None, and ``name=(type:16 type)`` a tuple.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 86, 89, 90, 120)
"""A100, RTX 30xx, RTX 40xx, H100/H200, RTX 50xx."""
ALIKE = (80, 86, 89)
"""Those for which Triton writes the same PTX, but for the line that names the target."""

_SMEM_OPT_IN_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
# warps, blocks and KiB of shared memory an SM holds: CUDA programming guide, compute capabilities
_PER_SM = {
    80: (64, 32, 164),
    86: (48, 16, 100),
    89: (48, 24, 100),
    90: (64, 32, 228),
    100: (64, 32, 228),
    120: (48, 24, 100),
}
_INSTRUCTIONS = {
    "LDG.128": r"\bLDG\.E[\w.]*\.128",
    "LDG.64": r"\bLDG\.E[\w.]*\.64",
    "LDG.<=32": r"\bLDG\.E(?![\w.]*\.(?:128|64))",
    "LDGSTS": r"\bLDGSTS",
    "STG": r"\bSTG",
    "LDS": r"\bLDS\b",
    "LDSM": r"\bLDSM",
    "STS": r"\bSTS\b",
    "BAR": r"\bBAR\.",
    "SHFL": r"\bSHFL",
    "MMA": r"\b[HIQ]G?MMA",
    "FFMA": r"\bFFMA",
    "HFMA2": r"\bHFMA2",
    "F2F": r"\bF2FP?\b",
    "I2F": r"\bI2FP?\b",
    "LOP3": r"\bLOP3",
    "PRMT": r"\bPRMT",
    "SHF": r"\bSHF",
    "LDL/STL": r"\b(?:LDL|STL)\b",
    "ATOM": r"\b(?:ATOM|RED)[G.]",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What one kernel costs on one architecture.

    Attributes:
        arch: 86 for sm_86.
        registers: Per thread.
        spill_bytes: Spill stores plus loads.
        shared_bytes: Shared memory per program.
        num_warps: Warps per program.
        warps_per_sm: Resident warps, by registers, shared memory and hardware limits.
        instructions: Counts over the whole kernel, by class.
        loop_instructions: Instructions of its first loop that multiplies matrices, else of its
            longest; 0 when it has none or is fully unrolled.
        sass: The machine code as text.
    """

    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    warps_per_sm: int
    instructions: Mapping[str, int] = field(default_factory=dict)
    loop_instructions: int = 0
    sass: str = field(default="", repr=False)

    @property
    def shared_limit_bytes(self) -> int:
        """The most shared memory a program may ask for on this architecture."""
        return _SMEM_OPT_IN_KIB[self.arch] << 10


def compile_kernel(
    fn: Any, signature: str, constants: Mapping[str, Any], *, arch: int, **options: Any
) -> CompileReport:
    """Compiles ``fn`` for ``sm_<arch>``; raises whatever the compiler raises.

    Args:
        fn: A ``@triton.jit`` function (autotune and heuristics wrappers are taken off).
        signature: Types of the arguments that are not constants; see the top of the file.
        constants: Values of the constexpr arguments.
        arch: One of ``ARCHITECTURES``.
        options: ``num_warps``, ``num_stages`` …
    """
    compiled = _compiled(fn, signature, constants, arch, options)
    return _report(compiled, compiled.asm["ptx"], arch)


def compile_alike(
    fn: Any,
    signature: str,
    constants: Mapping[str, Any],
    *,
    archs: Sequence[int],
    **options: Any,
) -> list[CompileReport]:
    """The same for several of ``ALIKE`` that are given the same constants: Triton runs
    for the first of them, the assembler for each."""
    first, *others = archs
    if others and not {first, *others} <= set(ALIKE):
        raise ValueError(f"Triton writes different code for {list(archs)}: compile each")
    compiled = _compiled(fn, signature, constants, first, options)
    ptx = compiled.asm["ptx"]
    rest = [_report(compiled, retargeted(ptx, arch), arch) for arch in others]
    return [_report(compiled, ptx, first), *rest]


def ptx_of(
    fn: Any, signature: str, constants: Mapping[str, Any], *, arch: int, **options: Any
) -> str:
    """What Triton gives to the assembler."""
    ptx: str = _compiled(fn, signature, constants, arch, options).asm["ptx"]
    return ptx


def retargeted(ptx: str, arch: int) -> str:
    """``ptx`` for another architecture."""
    return re.sub(r"^\.target sm_\w+", f".target sm_{arch}", ptx, count=1, flags=re.MULTILINE)


def _compiled(
    fn: Any, signature: str, constants: Mapping[str, Any], arch: int, options: Mapping[str, Any]
) -> Any:
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: compile in a process without it")
    while not isinstance(fn, triton.runtime.jit.JITFunction):
        fn = fn.fn
    return triton.compile(
        _source(fn, signature, constants),
        target=GPUTarget("cuda", arch, 32),
        options={"num_stages": 3, **options},
    )


def _report(compiled: Any, ptx: str, arch: int) -> CompileReport:
    log, cubin = _assembled(ptx, arch)
    sass = _disassemble(cubin)
    registers = int(_first(r"Used (\d+) registers", log)[0])
    spills = _first(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    return CompileReport(
        arch=arch,
        registers=registers,
        spill_bytes=sum(map(int, spills)),
        shared_bytes=shared,
        num_warps=warps,
        warps_per_sm=_resident_warps(arch, registers, shared, warps),
        instructions={name: len(re.findall(p, sass)) for name, p in _INSTRUCTIONS.items()},
        loop_instructions=_main_loop(sass),
        sass=sass,
    )


def _source(fn: Any, signature: str, constants: Mapping[str, Any]) -> ASTSource:
    given = dict(entry.strip().split("=", 1) for entry in signature.split(",") if entry.strip())
    types: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def one(text: str, place: tuple[int, ...]) -> str:
        name, _, divisible = text.partition(":")
        if divisible:
            attributes[place] = [["tt.divisibility", int(divisible)]]
        return name

    for index, param in enumerate(fn.params):
        name = param.name
        if name in constants or given.get(name) == "None":
            types[name], values[(index,)] = "constexpr", constants.get(name)
        elif name not in given:
            raise ValueError(f"argument {name!r} of {fn.__name__} is missing: add it to either")
        elif given[name].startswith("("):
            parts = given[name].strip("()").split()
            types[name] = tuple(one(part, (index, at)) for at, part in enumerate(parts))
        else:
            types[name] = one(given[name], (index,))
    return ASTSource(fn, types, values, attributes)


def _first(pattern: str, text: str) -> tuple[str, ...]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ptxas did not print {pattern!r}: {text[-400:]}")
    return found.groups()


def _assembled(ptx: str, arch: int) -> tuple[str, bytes]:
    """What the assembler says, and what it makes, with Triton's flags."""
    tool = knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas
    gpu = f"sm_{arch}" + ("a" if arch >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [tool.path, "-v", "--regAllocOptLevel=2", f"--gpu-name={gpu}", str(source)]
        command += ["-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ptxas failed for sm_{arch}: {done.stderr[-800:]}")
        return done.stderr, target.read_bytes()


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resident_warps(arch: int, registers: int, shared: int, warps: int) -> int:
    max_warps, max_blocks, shared_kib = _PER_SM[arch]
    registers_per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    by_registers = (65536 // registers_per_warp) // warps
    by_shared = (shared_kib << 10) // ((-(-shared // 1024) + 1) * 1024)  # 1 KiB reserved per block
    return min(by_registers, by_shared, max_blocks, max_warps // warps) * warps


def _main_loop(sass: str) -> int:
    """Instructions of the first loop that multiplies matrices, else of the longest loop.

    Slow paths (divergent barriers, say) stand behind an EXIT and jump back into the code; a stretch
    with an EXIT inside is one of those and no loop.
    """
    labels: dict[str, int] = {}
    lines: list[str] = []
    loops: list[list[str]] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*\.(L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif re.match(r"\s*(?:/\*[0-9a-f]+\*/\s+)?[@A-Z{]", line) and ";" in line:
            lines.append(line)
            target = re.search(r"\bBRA\b.*?\.(L_x_\d+)", line)
            if target and target[1] in labels:
                loops.append(lines[labels[target[1]] :])
    # a kernel ends with a branch to itself: a loop of one instruction
    loops = [loop for loop in loops if len(loop) > 1 and not re.search(r"\bEXIT\b", "".join(loop))]
    multiplying = [loop for loop in loops if re.search(_INSTRUCTIONS["MMA"], "".join(loop))]
    return len(multiplying[0]) if multiplying else max(map(len, loops), default=0)
