"""Triton's interpreter without work that it repeats. Interpreted draft phases take half the time.

At every launch of a kernel the interpreter replaces the functions of ``triton.language``, and puts them back after it.
It replaces them again at each call of a ``@triton.jit`` function by a kernel, though these calls find them replaced
already. And it builds a table of all dtypes whenever it looks one up.
"""

import functools


def make_faster() -> None:
    """Replace a module's functions at the first helper of a launch that uses it, and not again; keep dtypes."""
    from triton.language import core
    from triton.runtime import interpreter

    launch, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    language, replaced = (core, interpreter.tl), set()
    look_up, known = interpreter._get_np_dtype, {}

    @functools.cache
    def modules_of(helper):
        return tuple(any(value is module for value in helper.__globals__.values()) for module in language)

    def launched(self, *args, **kwargs):
        replaced.clear()
        return launch(self, *args, **kwargs)

    def called(self, *args, **kwargs):
        modules = modules_of(self.fn)
        if modules not in replaced:
            replaced.add(modules)
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def dtype_of(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launched, called
    interpreter._get_np_dtype = dtype_of
