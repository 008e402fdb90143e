"""Makes Triton's interpreter faster.

It replaces the functions of triton.language, around two hundred, for each launch of a kernel. But it also looks for
functions to replace at every call of a device function, such as `tl.sum`, inside a kernel: a third of the time of our
tests. This module replaces them at the launch only, also those in triton.language.core, which `tl.sum` uses.
"""

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

_replace = interpreter._patch_lang


def _replace_all(function: Any) -> Any:
    return _replace(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a device function."""
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


if knobs.runtime.interpret:
    interpreter._patch_lang = _replace_all
    interpreter.InterpretedFunction.__call__ = _call
