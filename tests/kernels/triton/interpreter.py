"""Makes Triton's interpreter faster, with the same results, and its products independent of the CPU.

Most of its time goes to bookkeeping, not to numbers:

- It replaces the functions of triton.language, around two hundred, for each launch of a kernel, and looks for functions
  to replace at every call of a device function, such as `tl.sum`. This module finds the replacements once, sets them at
  each launch only, also those in triton.language.core, which `tl.sum` uses, and removes them behind it.
- Each result is a tensor with a new type and a new shape. Here types and shapes that are equal are made once.
- It computes each sum and product of integers twice, the second time in 64 bits to detect an overflow, and then drops
  what it has found, because only `debug` would report it.
- It makes a table of twenty types to look up one.

On a GPU, a row of a product has the same bits wherever it is in its tile. The interpreter's products are those of
numpy's BLAS, which on some CPUs adds in another order for other rows. Here they are summed in float64 and then rounded.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

_replace = interpreter._patch_lang
_make_block_type = tl.block_type.__init__
_broadcast_others = interpreter.TritonSemantic.broadcast_impl_value
_find_np_dtype = interpreter._get_np_dtype
_multiply = interpreter.InterpreterBuilder.create_dot


class _Replacements:
    """The functions that replace others of triton.language. They do not depend on the kernel."""

    def __init__(self) -> None:
        scope = _replace(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        self._changes = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        scope.restore()

    def set(self) -> Any:
        scope = interpreter._LangPatchScope()
        for owner, name, function in self._changes:
            scope.set_attr(owner, name, function)
        return scope


_replacements: list[_Replacements] = []


def _replace_all(function: Any) -> Any:
    if not _replacements:
        _replacements.append(_Replacements())
    return _replacements[0].set()


def _replace_one(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    semantic = interpreter.TritonSemantic(builder)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(owner, name, replacement)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a device function."""
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], Any] = {}
"""Those of tensors, and how many elements they have."""


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
    if (known := _block_types.get(key)) is None:
        _make_block_type(self, element_ty, shape)
        known = _block_types[key] = self.__dict__.copy()
        of_tensors = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(self.numel)
        known["of_tensors"] = _shapes.setdefault(tuple(sizes), of_tensors)
    self.__dict__.update(known)


_SCALAR = tl.tuple([]), tl.constexpr(1)


def _tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _SCALAR


def _broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_others(self, lhs, rhs)


_np_dtypes: dict[str, Any] = {}


def _np_dtype(type: Any) -> Any:
    if (found := _np_dtypes.get(type.name)) is None:
        found = _np_dtypes[type.name] = _find_np_dtype(type)
    return found


def _equals(self: Any, other: Any) -> bool:
    """Of scalar types."""
    if type(other) is not tl.dtype:
        other = tl.core._unwrap_if_constexpr(other)
    return isinstance(other, tl.dtype) and bool(self.name == other.name)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if not a.data.dtype == b.data.dtype == d.data.dtype == np.float32:
        return _multiply(self, a, b, d, input_precision, max_num_imprecise_acc)
    product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


if knobs.runtime.interpret:
    interpreter._patch_attr = _replace_one
    interpreter._patch_lang = _replace_all
    interpreter.InterpretedFunction.__call__ = _call
    interpreter._get_np_dtype = _np_dtype
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast
    tl.block_type.__init__ = _block_type
    tl.block_type.to_ir = lambda self, builder: self  # which the builder's type is equal to
    tl.tensor.__init__ = _tensor
    tl.dtype.__eq__ = _equals
