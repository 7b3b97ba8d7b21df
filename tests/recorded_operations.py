"""Triton's operations, functions and kernels in the interpreter, which find out once what they do.

What an operation makes of its arguments (promotions, casts, broadcasts) depends on their types and on constants, and
takes far longer than the NumPy calls that come of it. So the first time, these are recorded, and repeated later where
types and constants are the same. Functions and kernels are recorded as a whole where their course does not depend on
what their tensors hold, or only on arguments such as a loop's end.
"""

import functools
import inspect

from recorded_calls import Recorder
from triton.language import core
from triton.runtime import interpreter

MOST = 20_000  # recordings of an operation; constants of many values would fill the memory
MOST_OUTCOMES = 16  # that a recording may have by what arguments hold


class UnknownError(Exception):
    """An argument that has no key."""


def key_of(value, tensors: list):
    """What is made of an argument depends on this; tensors are appended."""
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
    """Recordings by what some of the tensors hold."""

    def __init__(self, decided):
        super().__init__()
        self.decided = decided

    def outcome(self, tensors) -> tuple:
        return tuple(how(tensors[place]) for place, how in self.decided)


def recorded(run):
    """Let ``run(semantic, *args, **kwargs)`` be recorded, and repeated where the arguments are alike."""
    recordings: dict = {}

    def record(key, tensors, args, kwargs):
        recorder = Recorder(tensors)
        if not recorder.repeatable:  # the same tensor twice
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
            key = *[key_of(arg, tensors) for arg in args], *[(of, key_of(kwargs[of], tensors)) for of in kwargs]
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
    """A builtin of the language."""
    return recorded(lambda semantic, *args, **kwargs: member(*args, **kwargs, _semantic=semantic))


def recorded_function(fn):
    """A ``triton.jit`` function as the interpreter rewrote it; launches want its signature."""
    recordable = recorded(lambda semantic, *args, **kwargs: fn(*args, **kwargs))
    recordable.__signature__ = inspect.signature(fn)
    return functools.wraps(fn)(recordable)


def recorded_reduction(apply):
    """The method of reductions and scans."""

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
    """What makes tensors of the numbers that a function assigns to its variables."""

    def recordable(value, check_type=True):
        if type(value) is core.tensor or Recorder.current is None:
            return to_tensor(value, check_type)
        return Recorder.current.semantic.to_tensor(value, check_type)

    return recordable


def noticed(method, how):
    """A method of tensors that reads what they hold."""

    @functools.wraps(method)
    def noticing(tensor):
        if Recorder.current is not None:
            Recorder.current.decide(tensor, how)
        return method(tensor)

    return noticing
