"""Records Triton's operations, functions and kernels in the interpreter, and repeats the recordings.

An operation's promotions, casts and broadcasts depend only on the types of its arguments and on constants. Determining
them takes far longer than the resulting NumPy calls. So the first run records these calls, and later runs with the same
types and constants repeat them. Functions and kernels are recorded as a whole if their control flow does not depend on
values of tensors, or only on values of arguments, such as a loop's end.
"""

import functools
import inspect

from recorded_calls import Recorder
from triton.language import core
from triton.runtime import interpreter

MOST = 20_000  # recordings of an operation; constants with many values would otherwise fill the memory
MOST_OUTCOMES = 16  # recordings of an operation that depend on values of arguments


class UnknownError(Exception):
    """An argument has no key, so the operation cannot be recorded."""


def key_of(value, tensors: list):
    """A key for everything about an argument on which an operation depends; appends tensors to ``tensors``."""
    kind = type(value)
    if kind is core.tensor:
        handle = value.handle
        if type(handle) is not interpreter.TensorHandle:
            raise UnknownError
        tensors.append(value)
        return value.type.name, handle.dtype.name, handle.data.dtype.char, handle.data.shape
    if kind is int or kind is bool or kind is str or value is None:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is core.constexpr:
        return kind, key_of(value.value, tensors)
    if isinstance(value, core.dtype):
        return kind, value.name
    if kind is tuple or kind is list:
        return kind, *[key_of(part, tensors) for part in value]
    if kind is slice:
        return kind, value.start, value.stop, value.step
    if isinstance(value, (core.PropagateNan, interpreter.InterpretedFunction)):
        return kind, value
    raise UnknownError


class Choice(dict):
    """Recordings by the values of some of the tensors."""

    def __init__(self, decided):
        super().__init__()
        self.decided = decided

    def outcome(self, tensors) -> tuple:
        return tuple(how(tensors[place]) for place, how in self.decided)


def recorded(run):
    """Record ``run(semantic, *args, **kwargs)``, and repeat recordings for arguments with equal keys."""
    recordings: dict = {}

    def record(key, tensors, args, kwargs):
        recorder = Recorder(tensors)
        if not recorder.repeatable:  # the same tensor is given twice
            return run(interpreter.interpreter_semantic, *args, **kwargs)
        Recorder.current = recorder
        try:
            value = run(recorder.semantic, *args, **kwargs)
        finally:
            Recorder.current = None
        if len(recordings) > MOST:
            recordings.clear()
        repeat = recorder.compiled(value)
        if not recorder.decided or repeat is None:
            recordings[key] = repeat
            return value
        choice = recordings.setdefault(key, Choice(recorder.decided))
        if choice.decided == recorder.decided and len(choice) < MOST_OUTCOMES:
            choice[choice.outcome(tensors)] = repeat
        else:
            recordings[key] = None
        return value

    def recordable(*args, _semantic=None, **kwargs):
        if Recorder.current is not None:  # within another recording
            return run(Recorder.current.semantic, *args, **kwargs)
        tensors: list = []
        try:
            key = *[key_of(arg, tensors) for arg in args], *[(name, key_of(kwargs[name], tensors)) for name in kwargs]
        except UnknownError:
            return run(interpreter.interpreter_semantic, *args, **kwargs)
        repeat = recordings.get(key, recordings)
        if type(repeat) is Choice:
            repeat = repeat.get(repeat.outcome(tensors), recordings)
        if repeat is recordings:
            return record(key, tensors, args, kwargs)
        if repeat is None:
            return run(interpreter.interpreter_semantic, *args, **kwargs)
        return repeat(*tensors)

    return recordable


def recorded_builtin(member):
    """A recorded builtin of the language."""
    return recorded(lambda semantic, *args, **kwargs: member(*args, **kwargs, _semantic=semantic))


def recorded_function(fn):
    """A recorded ``triton.jit`` function, as rewritten by the interpreter; launches read its signature."""
    recordable = recorded(lambda semantic, *args, **kwargs: fn(*args, **kwargs))
    recordable.__signature__ = inspect.signature(fn)
    return functools.wraps(fn)(recordable)


def recorded_reduction(apply):
    """The recorded method of reductions and scans."""

    @functools.wraps(apply)
    def recordable(self, values):
        recorder, Recorder.current = Recorder.current, None  # a reduction may call its function for each element
        try:
            results = apply(self, values)
        finally:
            Recorder.current = recorder
        if recorder is not None:
            recorder.reduce(functools.partial(apply, self), values, results)
        return results

    return recordable


def recorded_constants(to_tensor):
    """A recorded ``to_tensor``, which makes tensors from numbers assigned to variables."""

    def recordable(value, check_type=True):
        if type(value) is core.tensor or Recorder.current is None:
            return to_tensor(value, check_type)
        return Recorder.current.semantic.to_tensor(value, check_type)

    return recordable


def noticed(method, how):
    """A method of tensors that reads their value, and tells the recorder."""

    @functools.wraps(method)
    def noticing(tensor):
        if Recorder.current is not None:
            Recorder.current.decide(tensor, how)
        return method(tensor)

    return noticing
