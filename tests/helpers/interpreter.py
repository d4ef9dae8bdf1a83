"""Triton's interpreter in half the time."""

import dataclasses
import math
from functools import cache

from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

_patched = set()


def accelerate():
    """Leave out what the interpreter does again and again with the same result, or without need."""
    builder = interpreter.interpreter_builder
    # Unless it debugs, it computes whether integers overflow but ignores the result.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    original = interpreter._get_np_dtype  # builds a dictionary of all dtypes in order to look up one
    of_number = cache(original)
    interpreter._get_np_dtype = lambda dtype: (original if dtype.scalar.is_ptr() else of_number)(dtype.scalar)
    InterpretedFunction.__call__ = _call
    # Every tensor and block type builds its shape anew, and block types also a name, which is hardly ever read.
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")


def _call(self, *args, **kwargs):
    """Call a function of a kernel, whose launch has replaced the language's functions by those of the interpreter.

    The original replaces them at every call, also those that only Triton's own functions see, which then stay replaced.
    """
    if self.fn not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


@cache
def _constants_of_shape(sizes):
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _init_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constants_of_shape(tuple(type.shape.values) if type.is_block() else ())


@cache
def _checked_shape(sizes):
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    return core.tuple(sizes), core.validate_block_shape(sizes)


def _init_block_type(self, element_ty, shape):
    self.element_ty = element_ty
    self.shape, self.numel = _checked_shape(tuple(core._unwrap_if_constexpr(size) for size in shape))
