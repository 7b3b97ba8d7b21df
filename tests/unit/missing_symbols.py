"""Runs the plugin with a vLLM that lacks a symbol: each case in a fork of one process that has imported vLLM.

Reads JSON ``{"model": folder, "gsd": path of a config, "cases": {name: [damage, symbol or module]}, "later": symbols}``
from stdin and writes the results, by case and by symbol, as JSON to stdout. The symbols in ``later`` are deleted one at
a time, after the plugin was loaded.
"""

import contextlib
import importlib
import io
import json
import logging
import os
import sys
import traceback


def main() -> None:
    job = json.load(sys.stdin)
    answers = {}
    with contextlib.redirect_stdout(sys.stderr):
        import vllm.plugins

        vllm.plugins.plugins_loaded = True  # each case registers the plugin itself
        _plain(job["model"]), _parsed([])  # import everything before forking
        for name, (damage, what) in job["cases"].items():
            answers[name] = _in_a_fork(_case, damage, what, job["model"], job["gsd"])
        answers.update(_in_a_fork(_later, job["later"], job["model"]))
    json.dump(answers, sys.stdout)


def _in_a_fork(function, *arguments) -> dict:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = function(*arguments)
        except BaseException:
            answer = {"broken": traceback.format_exc()}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = json.load(pipe)
    os.waitpid(child, 0)
    return answer


def _case(damage: str, what: str, model: str, gsd: str) -> dict:
    if damage.startswith("block"):
        if damage == "block behind":
            importlib.import_module("vllm.v1.metrics.loggers")
        sys.modules[what] = None
    else:
        owner, name = _owner_of(what)
        if damage == "delete":
            delattr(owner, name)
        elif damage == "kind":
            setattr(owner, name, 3)
        elif damage == "parameters":
            setattr(owner, name, lambda self, another: None)
    answer = {"plain_before": _plain(model)}
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("vllm.gsd").addHandler(handler)
    import vllm_gsd

    with contextlib.suppress(ImportError):
        from vllm_gsd.config import GSDConfigError
    try:
        vllm_gsd.register()
        vllm_gsd.register()
        answer["registered"] = True
    except Exception:
        answer["registered"] = traceback.format_exc()
    answer["warnings"] = warnings
    answer["plain"] = _plain(model)
    keys = {"method": "gsd", "model": None}
    answer["engine"], answer["engine_by_path"] = _refusal(model, keys), _refusal(model, gsd)
    try:
        from vllm.config.speculative import SpeculativeConfig

        SpeculativeConfig(**keys)
        answer["keys"] = "made"
    except GSDConfigError as error:
        answer["keys"] = str(error)
    except Exception as error:
        answer["keys"] = f"{type(error).__name__}: {error}"
    option = "--speculative-config"
    values = gsd, json.dumps(keys), "None"
    answer["command_line"] = _parsed([], *([option, value] for value in values))
    return answer


def _later(symbols: list[str], model: str) -> dict:
    import vllm_gsd

    vllm_gsd.register()
    answers = {"later": _plain(model)}
    for symbol in symbols:
        owner, name = _owner_of(symbol)
        with _deleted(owner, name):
            answers[symbol] = _refusal(model, {"method": "gsd", "model": None})
    return answers


@contextlib.contextmanager
def _deleted(owner, name: str):
    missing = object()
    before = vars(owner).get(name, missing)  # a field without a default is only an annotation
    annotations = vars(owner).get("__annotations__", {})
    annotation = annotations.pop(name, missing)
    if before is not missing:
        delattr(owner, name)
    yield
    if before is not missing:
        setattr(owner, name, before)
    if annotation is not missing:
        annotations[name] = annotation


def _owner_of(symbol: str) -> tuple:
    module, _, path = symbol.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name


def _plain(model: str) -> str:
    try:
        from vllm.engine.arg_utils import EngineArgs

        config = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    parts = config.scheduler_config, config.parallel_config.worker_cls, config.additional_config
    return f"served with {parts}"


def _refusal(model: str, speculative) -> str:
    try:
        from vllm.engine.arg_utils import EngineArgs

        args = EngineArgs(model=model, skip_tokenizer_init=True, enforce_eager=True, speculative_config=speculative)
        if hasattr(args, "create_engine_config"):
            args.create_engine_config()
        else:
            args.create_speculative_config(None, None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def _parsed(*every: list[str]) -> list[str]:
    """What one parser says to each list of arguments; to make one takes a second."""
    stderr = io.StringIO()
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        with contextlib.redirect_stderr(stderr):
            parser = FlexibleArgumentParser()
            if hasattr(EngineArgs, "add_cli_args"):
                AsyncEngineArgs.add_cli_args(parser)
            else:  # like a vLLM in which the function has another name
                parser.add_argument("--speculative-config", type=json.loads)
    except SystemExit:
        return [stderr.getvalue()] * len(every)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"] * len(every)
    return [_said(parser, arguments) for arguments in every]


def _said(parser, arguments: list[str]) -> str:
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            parser.parse_args(arguments)
    except SystemExit:
        return stderr.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "parsed"


if __name__ == "__main__":
    main()
