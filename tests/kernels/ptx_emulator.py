"""Runs the few PTX instructions of the kernels' inline assembly on arrays of 32-bit registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

Register = np.ndarray  # uint32 [lanes]


def _from_half(register: Register) -> np.ndarray:
    return np.ascontiguousarray(register).view(np.float16).astype(np.float64)


def _to_half(numbers: np.ndarray) -> Register:
    return numbers.astype(np.float16).view(np.uint32)


def _from_bfloat(register: Register) -> np.ndarray:
    bits = np.ascontiguousarray(register).view(np.int16).copy()
    return torch.from_numpy(bits).view(torch.bfloat16).double().numpy()


def _to_bfloat(numbers: np.ndarray) -> Register:
    return torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint32)


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit by bit, what the table says of the three: its bit 4 a + 2 b + c."""
    out = np.zeros_like(a)
    for entry in range(8):
        if int(table[0]) >> entry & 1:
            wanted = [x if entry & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
            out |= wanted[0] & wanted[1] & wanted[2]
    return out


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    pool = [(r >> np.uint32(8 * i)) & np.uint32(255) for r in (a, b) for i in range(4)]
    chosen = [(int(selector[0]) >> (4 * i)) & 7 for i in range(4)]
    out = np.zeros_like(a)
    for i, byte in enumerate(chosen):
        out |= pool[byte] << np.uint32(8 * i)
    return out


_OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "shr.b32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "add.u32": lambda a, b: a + b,
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
    "neg.f16x2": lambda a: a ^ np.uint32(0x80008000),
    "sub.rn.f16x2": lambda a, b: _to_half(_from_half(a) - _from_half(b)),
    "fma.rn.f16x2": lambda a, b, c: _to_half(_from_half(a) * _from_half(b) + _from_half(c)),
    "fma.rn.bf16x2": lambda a, b, c: _to_bfloat(
        _from_bfloat(a) * _from_bfloat(b) + _from_bfloat(c)
    ),
}


def run_ptx(code: str, inputs: list[Register], outputs: int = 1) -> list[Register]:
    """Executes ``code``; $0 .. are the outputs, then come the inputs."""
    registers = {f"${i + outputs}": value for i, value in enumerate(inputs)}

    def read(name: str) -> Register:
        if name in registers:
            return registers[name]
        return np.full_like(inputs[0], int(name, 0))

    for statement in code.strip().strip("{}").split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        operation, arguments = statement.split(None, 1)
        target, *sources = (argument.strip() for argument in arguments.split(","))
        registers[target] = _OPERATIONS[operation](*map(read, sources))
    return [registers[f"${i}"] for i in range(outputs)]
