"""Makes an engine fail if the host reads values from the device; functions run in the engine's process."""

import functools
from contextlib import contextmanager
from unittest import mock

import torch
from engine_process import model_runner
from torch.utils._python_dispatch import TorchDispatchMode

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2"}
METHODS = ("cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__")


class _NoReads(TorchDispatchMode):
    """Refuses operators that read values, or whose result's shape depends on values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        assert name not in READS and not by_mask, f"{function} reads from the device"
        return function(*args, **(kwargs or {}))


@contextmanager
def refused():
    """Make every read of a tensor by the host raise an AssertionError."""

    def refuse(self, *args, **kwargs):
        raise AssertionError("the host reads a tensor")

    with mock.patch.multiple(torch.Tensor, **dict.fromkeys(METHODS, refuse)), _NoReads():
        yield


def refuse_reads(llm) -> None:
    """Make drafting and the layout of verified rows raise if they read from the device.

    In steps with prompts, the draft's catch-up on the prompts may read, because the host knows their tokens.
    """
    speculator = model_runner(llm).speculator
    speculator.guarded = 0

    def guard(owner, name: str, applies=lambda *args: True) -> None:
        upstream = getattr(owner, name)

        @functools.wraps(upstream)
        def guarded(*args, **kwargs):
            if not applies(*args):
                return upstream(*args, **kwargs)
            speculator.guarded += 1
            with refused():
                return upstream(*args, **kwargs)

        setattr(owner, name, guarded)

    guard(speculator, "propose", lambda batch, *_: not batch.has_prefill)
    guard(speculator, "lay_out")
    guard(speculator.drafting, "propose")


def guarded_calls(llm) -> int:
    """The number of calls in which reads were refused."""
    return model_runner(llm).speculator.guarded


def learn_a_step_late(llm) -> None:
    """Make the host learn from a step only after it has drafted for the next one, as on a GPU."""
    model_runner(llm).speculator.late.in_step = True
