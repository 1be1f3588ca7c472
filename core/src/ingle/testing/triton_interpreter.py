"""Repairs Triton's interpreter (3.6 to 3.7), so that kernels can be tested without a GPU.

Set ``TRITON_INTERPRET=1`` *before* triton is imported, call ``install()`` before the first launch,
and never compile in the same process. What stock 3.7.1 gets wrong, and what is done about it:

* bf16 is held as uint16, and arithmetic, comparison, fma, reductions and ``tl.dot`` work on the
  bit patterns: decode to fp32, compute, round to nearest even;
* fp32 to bf16 truncates: round to nearest even;
* casts to fp8 lose the carry out of the mantissa (7.92 becomes 4.0) and NaN codes decode to
  numbers: convert as torch does, saturating as ``cvt.satfinite`` does;
* a comparison of scalars claims the dtype of its operands, so a mask made from it is rejected;
* ``@triton.autotune`` finds no driver: a stub, and the first configuration wins;
* slow: ``triton.language`` is patched again for every nested function, and every addition is
  checked for overflow: patched once, and checked only on request;
* nothing is checked: see ``triton_interpreter_checks`` for bounds and races.

Still unlike a GPU: programs run one after another (races between them are invisible unless
checked), layouts do not exist, cache modifiers and memory ordering are ignored, inline assembly is
not executed (kernels have a constexpr switch for plain arithmetic instead).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from ingle.testing.triton_interpreter_checks import install_checks

_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# dtypes numpy lacks: the interpreter keeps their bits in these
_BIT_DTYPES = {"bf16": np.uint16, "fp8e4nv": np.uint8, "fp8e5": np.uint8}
_LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}
_INSTALLED = "_ingle_repairs"


def install(
    check: Literal["bounds", "races"] | None = None, *, overflow_checks: bool = False
) -> None:
    """Repairs the interpreter of this process; a second call does nothing.

    Args:
        check: ``"bounds"``: every load, store and atomic must fall into the storage of a tensor
            argument. ``"races"``: also, no two programs may store to one address.
        overflow_checks: Keep Triton's check of every integer operation (a third of the time).
    """
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is not 1: set it before triton is imported")
    if hasattr(interpreter, _INSTALLED):
        return
    setattr(interpreter, _INSTALLED, True)
    builder = interpreter.InterpreterBuilder
    _repair_casts(builder)
    _repair_arithmetic(builder)
    _repair_dot(builder)
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        _repair_reduction(operation)
    if check is not None:
        install_checks(races=check == "races")
    _patch_language_once()
    if not overflow_checks:
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
            sanitize_overflow=False
        )
    _install_driver()


def _is_encoded(dtype: Any) -> bool:
    return dtype.scalar.name in _BIT_DTYPES


def _decode(data: np.ndarray, dtype: Any) -> np.ndarray:
    """The interpreter's array of ``dtype`` as numbers: fp32 where numpy has no such dtype."""
    data = np.ascontiguousarray(data)
    if dtype.name not in _BIT_DTYPES:
        return data
    bits = data.view(np.int16 if dtype.name == "bf16" else np.uint8).reshape(-1).copy()
    numbers = torch.from_numpy(bits).view(_TORCH_DTYPES[dtype.name]).float().numpy()
    return numbers.reshape(data.shape)


def _encode(numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """Numbers as the interpreter keeps ``dtype``: rounded to nearest even, fp8 saturating."""
    numbers = np.ascontiguousarray(numbers)
    if dtype.name not in _BIT_DTYPES:
        plain: np.ndarray = numbers.astype(interpreter._get_np_dtype(dtype))
        return plain
    wide = np.float64 if numbers.dtype == np.float64 else np.float32
    values = torch.from_numpy(numbers.astype(wide).reshape(-1).copy())
    if dtype.name in _LARGEST:
        values = values.clamp(-_LARGEST[dtype.name], _LARGEST[dtype.name])  # NaN stays NaN
    values = values.to(_TORCH_DTYPES[dtype.name])
    bits = values.view(torch.int16 if dtype.name == "bf16" else torch.uint8).numpy()
    return bits.view(_BIT_DTYPES[dtype.name]).reshape(numbers.shape)


def _handle(numbers: np.ndarray, dtype: Any) -> Any:
    return interpreter.TensorHandle(_encode(numbers, dtype), dtype)


def _repair_casts(builder: Any) -> None:
    stock = interpreter._convert_float
    nearest = (None, interpreter._ir.ROUNDING_MODE.RTNE)

    def convert_float(data: np.ndarray, src: Any, dst: Any, rounding: Any) -> Any:
        if src.name in _TORCH_DTYPES and dst.name in _TORCH_DTYPES and rounding in nearest:
            return _encode(_decode(data, src), dst)
        return stock(data, src, dst, rounding)

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if not (_is_encoded(source) or _is_encoded(target)):
            data = src.data.astype(interpreter._get_np_dtype(dst_type))
            return interpreter.TensorHandle(data, target)
        numbers = _decode(src.data, source)
        if target.name in _TORCH_DTYPES:
            return _handle(numbers, target)
        data = numbers.astype(interpreter._get_np_dtype(target))
        return interpreter.TensorHandle(data, target)

    interpreter._convert_float = convert_float
    builder.cast_impl = cast_impl


def _repair_arithmetic(builder: Any) -> None:
    stock_fma, stock_clamp = builder.create_fma, builder.create_clampf

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        if dtype.name != "bf16":
            out = op(lhs.data, rhs.data)
        else:
            out = op(_decode(lhs.data, dtype), _decode(rhs.data, rhs.dtype.scalar))
        if out.dtype == bool:
            return interpreter.TensorHandle(out, tl.int1)
        if dtype.name == "bf16":
            return _handle(out, dtype)
        return interpreter.TensorHandle(out, dtype)

    def unary_op(self: Any, arg: Any, op: Callable[..., Any]) -> Any:
        dtype = arg.dtype.scalar
        if dtype.name != "bf16":
            return interpreter.TensorHandle(op(arg.data), dtype)
        return _handle(op(_decode(arg.data, dtype)), dtype)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if dtype.name != "bf16":
            return stock_fma(self, x, y, z)
        a, b, c = (_decode(h.data, dtype) for h in (x, y, z))
        return _handle(a * b + c, dtype)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate_nan: Any) -> Any:
        dtype = x.dtype.scalar
        if dtype.name != "bf16":
            return stock_clamp(self, x, low, high, propagate_nan)
        return _handle(np.clip(*(_decode(h.data, dtype) for h in (x, low, high))), dtype)

    builder.binary_op, builder.unary_op = binary_op, unary_op
    builder.create_fma, builder.create_clampf = fma, clamp


def _repair_dot(builder: Any) -> None:
    def dot(self: Any, a: Any, b: Any, acc: Any, precision: Any, imprecise: Any) -> Any:
        left, right = (_decode(h.data, h.dtype.scalar) for h in (a, b))
        dtype = acc.dtype.scalar
        if left.dtype.kind in "iu":  # numpy's integer matmul is a slow loop; int8 sums fit fp64
            wide: Any = np.float64
        else:
            wide = np.float64 if dtype.name == "fp64" else np.float32
        out = np.matmul(left.astype(wide), right.astype(wide)) + _decode(acc.data, dtype)
        return _handle(out, dtype)

    builder.create_dot = dot


def _repair_reduction(operation: Any) -> None:
    """Reduces bf16 and fp8 in fp32 and rounds once (a GPU rounds after every custom combine)."""
    stock = operation.apply_impl

    def retype(x: Any, data: np.ndarray, dtype: Any) -> Any:
        block = tl.block_type(dtype, list(x.type.shape)) if x.type.is_block() else dtype
        return tl.core.tensor(interpreter.TensorHandle(data, dtype), block)

    def apply_impl(self: Any, inputs: Any) -> Any:
        dtypes = [x.dtype.scalar for x in inputs]
        if not any(map(_is_encoded, dtypes)):
            return stock(self, inputs)
        wide = (
            retype(x, _decode(x.handle.data, t), tl.float32) if _is_encoded(t) else x
            for x, t in zip(inputs, dtypes, strict=True)
        )
        result = stock(self, tuple(wide))
        outputs = list(result) if isinstance(result, list | tuple) else [result]
        for i, (x, t) in enumerate(zip(outputs, dtypes, strict=True)):
            if _is_encoded(t) and x.dtype.scalar.name == "fp32":
                outputs[i] = retype(x, _encode(x.handle.data, t), t)
        return outputs

    operation.apply_impl = apply_impl


class _NoScope:
    def restore(self) -> None:
        pass


def _patch_language_once() -> None:
    class Namespace:
        __globals__ = {"tl": tl, "core": tl.core}  # noqa: RUF012 - the shape _patch_lang reads

    interpreter._patch_lang(Namespace)
    interpreter._patch_lang = lambda fn: _NoScope()
    # Triton 3.6 with numpy 2.4: int() of a one-element array raises
    tl.core.tensor.__index__ = lambda self: int(np.asarray(self.handle.data).reshape(-1)[0])


class _StubDriver:
    """Just enough of a driver for autotune, which then takes the first configuration."""

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda fn, quantiles=None, **options: [1.0, 1.0, 1.0]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 89, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        pass


def _install_driver() -> None:
    try:
        triton.runtime.driver.active  # noqa: B018 - the look-up itself raises without a driver
    except RuntimeError:
        triton.runtime.driver.set_active(_StubDriver())
