"""Makes Triton's interpreter faster by avoiding repeated work.

At every launch of a kernel, the interpreter replaces the functions of ``triton.language`` and restores them afterwards.
It does the same again for each call of a ``@triton.jit`` function by a kernel. Here, they stay replaced, because a
process that interprets compiles nothing. The interpreter also copies CPU tensors, checks every sum for overflow without
using the result, and builds a table of all dtypes for each lookup; this module avoids all of that. Finally,
``recorded_operations`` caches the repeated work of single operations.
"""

import dataclasses
import functools
import inspect
import operator

import torch


def make_faster() -> None:
    """Make all kernels of this process faster."""
    from triton.runtime import interpreter

    keep_language(interpreter)
    keep_functions(interpreter)
    keep_arguments(interpreter)
    keep_dtypes(interpreter)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # with it, overflows would be reported
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def keep_language(interpreter) -> None:
    """Replace the language in each kernel's module only once, and its operations by recorded ones."""
    from recorded_operations import noticed, recorded_builtin

    replace, replace_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
    language = interpreter.tl.core, interpreter.tl
    replaced, unchanged = set(), interpreter._LangPatchScope()

    @functools.cache
    def visible(fn) -> tuple:
        seen = inspect.unwrap(fn).__globals__.values()
        return tuple(any(value is module for value in seen) for module in language)

    def replaced_once(fn):
        modules = visible(fn)
        if modules not in replaced:
            replaced.add(modules)
            replace(inspect.unwrap(fn))
        return unchanged

    def replaced_builtin(owner, name, member, builder, scope):
        scope.set_attr(owner, name, recorded_builtin(member))

    def noticed_tensor(tensor, scope):
        replace_tensor(tensor, scope)
        for name, how in (("__bool__", bool), ("__index__", operator.index)):
            scope.set_attr(tensor, name, noticed(getattr(tensor, name), how))

    interpreter._patch_lang, interpreter._patch_attr = replaced_once, replaced_builtin
    interpreter._patch_lang_tensor = noticed_tensor


def keep_functions(interpreter) -> None:
    """Record functions and reductions."""
    from recorded_operations import recorded_constants, recorded_function, recorded_reduction

    function, reductions = interpreter.InterpretedFunction, interpreter.ReduceScanOpInterface
    rewrite, rewritten = function.rewrite, {}

    def rewrite_once(self):
        if self.fn not in rewritten:
            rewritten[self.fn] = recorded_function(rewrite(self))
        return rewritten[self.fn]

    function.rewrite = rewrite_once
    reductions.apply = recorded_reduction(reductions.apply)
    interpreter.interpreter_semantic.to_tensor = recorded_constants(interpreter.interpreter_semantic.to_tensor)


def keep_arguments(interpreter) -> None:
    """Pass arguments to a kernel without copies if all of them are on the CPU."""
    executor = interpreter.GridExecutor
    copy, copy_back = executor._init_args_hst, executor._restore_args_dev

    def on_host(value) -> bool:
        if isinstance(value, torch.Tensor):
            return value.device.type == "cpu"
        return not (hasattr(value, "data_ptr") or isinstance(value, (tuple, interpreter.TensorDescriptor)))

    def arguments(self, args, kwargs):
        if all(map(on_host, (*args, *kwargs.values()))):
            return args, kwargs
        return copy(self, args, kwargs)

    def put_back(self, args, own, kwargs, own_kwargs):
        if own is not args:
            copy_back(self, args, own, kwargs, own_kwargs)

    executor._init_args_hst, executor._restore_args_dev = arguments, put_back


def keep_dtypes(interpreter) -> None:
    """Look up each dtype once."""
    look_up, known = interpreter._get_np_dtype, {}

    def dtype_of(kind):
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = dtype_of
