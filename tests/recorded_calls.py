"""Records the operations of Triton's interpreter on arrays as the source of a Python function."""

import functools

import numpy as np
from triton.language import core
from triton.runtime import interpreter

CONSTANT = {"create_splat", "create_make_range", "cast_impl"}  # with constant arguments, the result is constant
MOST_LINES = 4_000
standard = interpreter.tl.standard
# Combine functions that the interpreter reduces with NumPy, and NumPy's operators for them.
REDUCTIONS = {standard._sum_combine: np.add, standard._elementwise_max: np.fmax, standard._elementwise_min: np.fmin}


class Recorder:
    """Replaces the interpreter's builder while a function runs, and records it.

    Every call of the builder becomes a line of source. Simple calls become NumPy expressions; see ``FORMS``.
    """

    current: "Recorder | None" = None

    def __init__(self, tensors):
        self.tensors, self.semantic = tensors, interpreter.TritonSemantic(self)
        self.arrays = {id(tensor.handle): f"t{place}.handle.data" for place, tensor in enumerate(tensors)}
        self.repeatable, self.decided = len(self.arrays) == len(tensors), []
        self.values: dict[int, str] = {}  # names of values that are not arrays
        self.views: dict[int, tuple] = {}  # broadcast views of smaller arrays
        self.fixed: set[int] = set()
        self.scope, self.lines, self.kept = {"make": make_tensor, "Handle": interpreter.TensorHandle}, [], []

    def __getattr__(self, name):
        method = getattr(interpreter.interpreter_builder, name)
        if not callable(method) or name.endswith("_ty"):
            return method
        if method.__name__ == "<lambda>":  # it calls other methods, such as binary_op, which are recorded instead
            return functools.partial(getattr(type(interpreter.interpreter_builder), name), self)

        def call(*args, **kwargs):
            result = method(*args, **kwargs)
            self.repeatable &= not kwargs and len(self.lines) < MOST_LINES
            if self.repeatable:
                self.record(name, method, args, result)
            return result

        return call

    def record(self, name: str, method, args, result) -> None:
        """Record a call of the builder."""
        self.kept += *args, result  # keep them alive, so that their ids stay unique
        handles = {id(arg) for arg in args if isinstance(arg, interpreter.TensorHandle)}
        if name.startswith("get_") or (name in CONSTANT and handles <= self.fixed):
            self.fixed.add(id(result))
            self.arrays[id(result)] = self.constant(result.data)
        elif name in ("create_splat", "create_broadcast"):
            (small,) = (arg for arg in args if isinstance(arg, interpreter.TensorHandle))
            if small.data.dtype == result.data.dtype:
                self.views[id(result)] = small, self.constant(result.data.shape)
            else:  # such as a comparison of integers
                source = f"{self.array(small)}.astype({self.constant(result.data.dtype)})"
                source = f"{self.constant(broadcast)}({source}, {self.constant(result.data.shape)})"
                self.arrays[id(result)] = self.line(source)
        elif source := name in FORMS and FORMS[name](self, *args, result):
            self.arrays[id(result)] = self.line(source)
        else:
            own = self.line(f"{self.constant(method)}({', '.join(map(self.argument, args))})")
            if isinstance(result, interpreter.TensorHandle):
                self.arrays[id(result)] = f"{own}.data"
            else:
                self.values[id(result)] = own

    def line(self, source: str) -> str:
        """Record a line that computes a value, and return the value's name."""
        own = f"v{len(self.lines)}"
        self.lines.append(f"{own} = {source}")
        return own

    def constant(self, value) -> str:
        """The name of a value that is the same in every run."""
        self.repeatable &= not isinstance(getattr(value, "value", None), core.tensor)  # a constant times a tensor
        own = f"c{len(self.scope)}"
        self.scope[own] = value
        return own

    def array(self, handle) -> str:
        """The source of a handle's array."""
        if id(handle) in self.views and id(handle) not in self.arrays:
            small, shape = self.views[id(handle)]
            self.arrays[id(handle)] = self.line(f"{self.constant(broadcast)}({self.array(small)}, {shape})")
        self.repeatable &= id(handle) in self.arrays
        return self.arrays.get(id(handle), "None")

    def operands(self, *handles) -> list[str]:
        """The sources of arrays that NumPy broadcasts to a common shape."""
        shape = np.broadcast_shapes(*(handle.data.shape for handle in handles))
        whole = any(handle.data.shape == shape for handle in handles if id(handle) not in self.views)
        return [
            self.array(self.views[id(handle)][0] if whole and id(handle) in self.views else handle)
            for handle in handles
        ]

    def argument(self, value) -> str:
        """The source of an argument of a builder's method."""
        if isinstance(value, interpreter.TensorHandle):
            return f"Handle({self.array(value)}, {self.constant(value.dtype)})"
        if id(value) in self.values:
            return self.values[id(value)]
        if isinstance(value, (list, tuple)):
            parts = "".join(f"{self.argument(part)}, " for part in value)
            return f"[{parts}]" if isinstance(value, list) else f"({parts})"
        return self.constant(value)

    def tensor(self, value) -> str:
        """The source of a tensor or a tuple of tensors."""
        for place, tensor in enumerate(self.tensors):
            if value is tensor:
                return f"t{place}"
        if isinstance(value, core.tensor) and value.handle is not None:  # the result of tl.store has none
            dtype = getattr(value.handle, "dtype", None)  # a block pointer has none
            kept = ", ".join(map(self.constant, (dtype, value.shape, value.numel, value.type, value.dtype)))
            return f"make({self.array(value.handle)}, {kept})"
        if type(value) is tuple:
            return f"({''.join(f'{self.tensor(part)}, ' for part in value)})"
        known = int, float, str, core.constexpr, core.dtype, core.tensor
        self.repeatable &= value is None or isinstance(value, known)
        return self.constant(value)

    def reduce(self, apply, values, results) -> None:
        """Record a reduction or scan of one or more tensors, which does not call the builder."""
        self.kept += values, results
        single, operation = isinstance(values, core.tensor), apply.args[0]
        operator = isinstance(operation, interpreter.ReduceOps) and REDUCTIONS.get(operation.combine_fn)
        if single and operator and operation.axis is not None:
            axis, keep, dtype = int(operation.axis), bool(operation.keep_dims), self.constant(results.handle.data.dtype)
            source = f"{self.constant(operator.reduce)}({self.array(values.handle)}, {axis}, keepdims={keep})"
            several = values.handle.data.ndim > 1 or keep
            source = f"{source}.astype({dtype})" if several else f"{self.constant(np.array)}([{source}], {dtype})"
            self.arrays[id(results.handle)] = self.line(source)
            return
        own = self.line(f"{self.constant(apply)}({self.tensor(values)})")
        for place, result in enumerate(results if isinstance(results, tuple) else [results]):
            self.arrays[id(result.handle)] = f"{own}{f'[{place}]' * (not single)}.handle.data"

    def decide(self, tensor, how) -> None:
        """Record that the control flow depends on a tensor's value."""
        if id(tensor.handle) in self.fixed or (how is bool and tensor.handle.data.size != 1):  # blocks are always true
            return
        place = next((place for place, own in enumerate(self.tensors) if own is tensor), None)
        self.repeatable &= place is not None
        self.decided.append((place, how))

    def compiled(self, value):
        """Compile the recording to a function of the tensor arguments; None if it could not be repeated exactly."""
        result = self.tensor(value)
        if not self.repeatable:
            return None
        parameters = ", ".join(f"t{place}" for place in range(len(self.tensors)))
        body = "\n    ".join([*self.lines, f"return {result}"])
        exec(f"def repeat({parameters}):\n    {body}", self.scope)
        return self.scope["repeat"]


def make_tensor(array, array_dtype, shape, numel, kind, dtype):
    """Make a tensor and its handle without calling their constructors."""
    tensor, handle = core.tensor.__new__(core.tensor), interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = array, array_dtype, {}
    tensor.handle, tensor.shape, tensor.numel, tensor.type, tensor.dtype = handle, shape, numel, kind, dtype
    return tensor


def broadcast(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcast an array to a shape, as a view."""
    if array.size == 1:
        return np.ndarray(shape, array.dtype, array, strides=(0,) * len(shape))
    return np.broadcast_to(array, shape)


def elementwise(recorder, *args) -> str:
    """The source of ``binary_op`` and ``ternary_op``."""
    *handles, operator, result = args
    source = f"{recorder.constant(operator)}({', '.join(recorder.operands(*handles))})"
    kept = operator(*(handle.data for handle in handles)).dtype == result.data.dtype
    return source if kept else f"{source}.astype({recorder.constant(result.data.dtype)})"


def divide(recorder, lhs, rhs, result) -> str:
    """The source of an integer division that rounds towards zero."""
    dividend, divisor = recorder.operands(lhs, rhs)
    return f"({dividend} - {recorder.constant(np.fmod)}({dividend}, {divisor})) // {divisor}"


def add_pointer(recorder, pointer, offset, result) -> str:
    base, steps = recorder.operands(pointer, offset)
    size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    return f"{base} + {size} * {steps}.astype({recorder.constant(np.uint64)})"


def load(recorder, pointer, mask, other, *rest) -> str:
    """The source of a load. The default mask loads everything, and the default for masked elements is 0."""
    dtype = rest[-1].data.dtype
    other = recorder.array(other) if other is not None else recorder.constant(np.zeros(pointer.data.shape, dtype))
    call = recorder.constant(interpreter._interpreter.load)
    return f"{call}({recorder.array(pointer)}, {_mask(recorder, pointer, mask)}, {other}, {recorder.constant(dtype)})"


def store(recorder, pointer, value, mask, *_) -> str:
    call = recorder.constant(interpreter._interpreter.store)
    return f"{call}({recorder.array(pointer)}, {recorder.array(value)}, {_mask(recorder, pointer, mask)})"


def _mask(recorder, pointer, mask) -> str:
    return recorder.constant(np.ones(pointer.data.shape, bool)) if mask is None else recorder.array(mask)


def cast(recorder, source, dst_type, result) -> str | None:
    if "bf16" in (source.dtype.scalar.name, dst_type.scalar.name):
        return None
    return f"{recorder.array(source)}.astype({recorder.constant(result.data.dtype)})"


def reshape(recorder, source, *rest) -> str:
    return f"{recorder.array(source)}.reshape({recorder.constant(rest[-1].data.shape)})"


FORMS = {
    "binary_op": elementwise,
    "ternary_op": elementwise,
    "create_idiv": divide,
    "create_addptr": add_pointer,
    "create_load": lambda recorder, pointer, *rest: load(recorder, pointer, None, None, *rest),
    "create_masked_load": load,
    "create_store": lambda recorder, pointer, value, *_: store(recorder, pointer, value, None),
    "create_masked_store": store,
    "cast_impl": cast,
    "create_expand_dims": reshape,
}
