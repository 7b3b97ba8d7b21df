"""Triton's specialisation keys of the kernels that an interpreted engine launches.

A key that does not occur during the start would make a kernel compile while requests wait. These functions run in the
engine's process.
"""

import json

SEEN: dict[str, set[str]] = {}  # keys by name of our kernels


def record_launch_keys() -> None:
    """Start to record the key of every launch."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction, create_function_from_signature

    class Backend(BaseBackend):
        """Specialises arguments like the backends of GPUs."""

        @classmethod
        def parse_options(cls, options):
            return options

    upstream, keys = InterpretedFunction.run, {}

    def key_of(kernel, *args, **options) -> str:
        if kernel not in keys:
            how = {name: kernel.kwargs[name] for name in ("do_not_specialize", "do_not_specialize_on_alignment")}
            compiled = JITFunction(kernel.fn, **how)
            keys[kernel] = create_function_from_signature(compiled.signature, compiled.params, Backend)
        _, specialisation, options = keys[kernel](*args, debug=False, **options)
        return f"{specialisation} {options}"

    def run(self, *args, **kwargs):
        if self.fn.__module__.startswith("vllm_gsd."):
            options = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
            SEEN.setdefault(self.__name__, set()).add(key_of(self, *args, **options))
        return upstream(self, *args, **kwargs)

    InterpretedFunction.run = run


def launch_keys(llm) -> str:
    """The keys of all launches so far, by kernel, as JSON."""
    return json.dumps({name: sorted(keys) for name, keys in sorted(SEEN.items())})
