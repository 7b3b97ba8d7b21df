"""Answer a file of prompts on a Ray cluster with graph-structured speculative decoding. A stopped run can be resumed.

Prompts are JSON lines ``{"id": ..., "prompt": ...}``. Answers are appended to ``--out`` as JSON lines ``{"id", "text",
"tokens"}`` in the order of their arrival. Run it again with the same ``--out`` to answer the missing prompts. A prompt
that vLLM refuses, such as one that is too long, does not stop the others.
"""

import argparse
import json
import math
import os
from pathlib import Path

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from tqdm import tqdm

from vllm_gsd.config import GSDConfig, GSDConfigError, read

ANSWER = ("id", "text", "tokens")
ERROR = "__inference_error__"  # Ray's column; empty for an answer
BEGINNING = b'{"id": '  # every line of answers begins like this


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}, but must be a whole number above 0")
    return int(text)


def temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text!r}, but must be a number of at least 0")
    return value


def keys(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"it is {text!r}, but must be a JSON object")
    return value


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target model: a path that exists on every node, or a hub id")
    parser.add_argument("--gsd", required=True, type=Path, help="gsd.json; its draft must also be on every node")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--engines", type=count, default=1, help="number of engines")
    parser.add_argument("--tensor-parallel-size", type=count, default=1, help="ranks of each engine, over Ray")
    parser.add_argument("--batch-size", type=count, default=32, help="prompts per batch sent to an engine")
    parser.add_argument("--max-tokens", type=count, default=256)
    parser.add_argument("--temperature", type=temperature, default=0.0)
    parser.add_argument("--engine", type=keys, default={}, help="more engine arguments of vLLM, as JSON")
    return parser.parse_args()


def read_lines(path: Path, text: str, keys: tuple[str, ...]) -> list[dict]:
    """The JSON objects in a text, one per line. Exits if a line is something else, lacks a key or has no usable id."""
    rows = []
    # Not `splitlines`: JSON strings may contain U+2028, at which it splits.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not all(key in row for key in keys):
            raise SystemExit(f"Line {number} of {path} is not a JSON object with {' and '.join(keys)}.")
        if not isinstance(row["id"], str | int | float):
            id_ = json.dumps(row["id"])
            raise SystemExit(f"Line {number} of {path} has the id {id_}, but ids must be strings or numbers.")
        rows.append(row)
    return rows


def answered(out: Path) -> set:
    """The ids with an answer. An incomplete last line, left by a killed run, is removed from the file.

    Exits without changing the file if this program did not write it.
    """
    if not out.exists():
        return set()
    content = out.read_bytes()
    end = content.rfind(b"\n") + 1
    whole, rest = content[:end], content[end:]
    try:
        answers = read_lines(out, whole.decode(), ANSWER)
    except UnicodeDecodeError:
        raise SystemExit(f"{out} is not a text file, but must be a file of answers or not exist.") from None
    if not (rest.startswith(BEGINNING) or BEGINNING.startswith(rest)):
        raise SystemExit(f"{out} does not end with an answer, but must be a file of answers or not exist.")
    os.truncate(out, end)
    return {answer["id"] for answer in answers}


def processor(args: argparse.Namespace):
    """The stage that runs vLLM, which also tokenizes and detokenizes."""
    config = vLLMEngineProcessorConfig(
        model_source=args.target,
        engine_kwargs={
            "speculative_config": read(args.gsd),
            "tensor_parallel_size": args.tensor_parallel_size,
            **args.engine,
        },
        # Without this, Ray Data asks the cluster for GPUs.
        placement_group_config={"bundles": [{"CPU": 1}] * args.tensor_parallel_size},
        concurrency=args.engines,
        batch_size=args.batch_size,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        should_continue_on_error=True,
        log_engine_metrics=False,  # True needs the packages of ray[serve]
    )
    params = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return build_processor(
        config,
        preprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "sampling_params": params},
        postprocess=lambda row: {"id": row["id"], "text": row["generated_text"], "tokens": row["num_generated_tokens"]},
        # These two need hardly any CPU time, and the engines may occupy all declared CPUs.
        preprocess_map_kwargs={"num_cpus": 0},
        postprocess_map_kwargs={"num_cpus": 0},
    )


def main() -> None:
    args = arguments()
    try:
        text = args.prompts.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--prompts is {args.prompts}, but cannot be read as a text file ({error}).") from None
    prompts = read_lines(args.prompts, text, ("id", "prompt"))
    if not prompts:
        raise SystemExit(f"--prompts is {args.prompts}, but has no prompts.")
    if wrong := [row for row in prompts if not isinstance(row["prompt"], str)]:
        raise SystemExit(f"In {args.prompts}, the prompt of id {wrong[0]['id']!r} is no text, but must be a string.")
    if empty := [row for row in prompts if not row["prompt"]]:
        raise SystemExit(f"In {args.prompts}, the prompt of id {empty[0]['id']!r} is empty, but must have text.")
    if len({row["id"] for row in prompts}) < len(prompts):
        raise SystemExit(f"In {args.prompts}, some ids occur twice, but each must be unique.")
    try:
        GSDConfig.load(args.gsd)
    except GSDConfigError as error:
        raise SystemExit(f"--gsd has a mistake: {error}") from None
    try:
        done = answered(args.out)
        args.out.open("a").close()  # before the engines start
    except OSError as error:
        raise SystemExit(f"--out is {args.out}, but cannot be written as a file ({error.strerror}).") from None
    missing = [row for row in prompts if row["id"] not in done]
    if not missing:
        print(f"All {len(prompts)} prompts have their answers.")
        return
    # Answers arrive by block, so make one block per batch.
    dataset = ray.data.from_items(missing, override_num_blocks=math.ceil(len(missing) / args.batch_size))
    bar = tqdm(total=len(prompts), initial=len(prompts) - len(missing), unit="prompt")
    failed = {}
    with args.out.open("a") as out, bar:
        for answer in processor(args)(dataset).iter_rows():
            if answer[ERROR]:
                failed[answer["id"]] = answer[ERROR]
                continue
            out.write(json.dumps({key: answer[key] for key in ANSWER}) + "\n")
            out.flush()
            bar.update()
    if failed:
        first, reason = next(iter(failed.items()))
        raise SystemExit(f"{len(failed)} of {len(prompts)} prompts have no answer, such as id {first!r}: {reason}")


if __name__ == "__main__":
    main()
