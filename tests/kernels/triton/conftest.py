"""Kernels run in Triton's interpreter, which is made faster before the first of them."""

from tests.kernels.triton import interpreter as interpreter
