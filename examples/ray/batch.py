"""Answer a file of prompts on a Ray cluster, with graph-structured speculative decoding. It can be stopped and resumed.

Prompts are JSON lines ``{"id": ..., "prompt": ...}``; answers are appended to ``--out`` as JSON lines ``{"id", "text",
"tokens"}`` in the order in which they come. Started again with the same ``--out``, it answers what is missing there.
"""

import argparse
import json
import math
import os
from pathlib import Path

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from tqdm import tqdm

ANSWER = ("id", "text", "tokens")
BEGINNING = b'{"id": '  # of a line of answers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="target model: a path that every node has, or a hub id")
    parser.add_argument("--gsd", required=True, type=Path, help="gsd.json; its draft model too must be on every node")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--engines", type=int, default=1, help="engines side by side")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks of an engine, over Ray")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts handed to an engine at a time")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--engine", type=json.loads, default={}, help="further engine arguments of vLLM, as JSON")
    return parser.parse_args()


def read_lines(path: Path, text: str, keys: tuple[str, ...]) -> list[dict]:
    """The JSON objects in a file's text, one a line. The job ends if a line is something else or lacks a key."""
    rows = []
    # Not splitlines: JSON's strings may hold what else that takes for the end of a line (U+2028).
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not all(key in row for key in keys):
            raise SystemExit(f"Line {number} of {path} is no JSON object with {' and '.join(keys)}.")
        rows.append(row)
    return rows


def answered(out: Path) -> set:
    """Ids that have their answer; an answer that was being written when the job was killed is cut off the file.

    A file that this program did not write is refused and stays as it is.
    """
    if not out.exists():
        return set()
    content = out.read_bytes()
    end = content.rfind(b"\n") + 1
    whole, rest = content[:end], content[end:]
    try:
        answers = read_lines(out, whole.decode(), ANSWER)
    except UnicodeDecodeError:
        raise SystemExit(f"{out} is no text, but must be a file of answers or not exist.") from None
    if not (rest.startswith(BEGINNING) or BEGINNING.startswith(rest)):
        raise SystemExit(f"{out} ends with something that is no answer, but must be a file of answers or not exist.")
    os.truncate(out, end)
    return {answer["id"] for answer in answers}


def processor(args: argparse.Namespace):
    """The stage that runs vLLM; it makes prompts tokens and tokens text by itself."""
    config = vLLMEngineProcessorConfig(
        model_source=args.target,
        engine_kwargs={
            "speculative_config": json.loads(args.gsd.read_text()),
            "tensor_parallel_size": args.tensor_parallel_size,
            **args.engine,
        },
        # Without it Ray Data asks the cluster for GPUs.
        placement_group_config={"bundles": [{"CPU": 1}] * args.tensor_parallel_size},
        concurrency=args.engines,
        batch_size=args.batch_size,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,  # vLLM's counters in Ray's metrics: only with the packages of ray[serve]
    )
    params = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return build_processor(
        config,
        preprocess=lambda row: {"id": row["id"], "prompt": row["prompt"], "sampling_params": params},
        postprocess=lambda row: {
            "id": row["id"],
            "text": row["generated_text"],
            "tokens": row["num_generated_tokens"],
        },
        # These two do next to nothing, and an engine may have all CPUs that the cluster declares.
        preprocess_map_kwargs={"num_cpus": 0},
        postprocess_map_kwargs={"num_cpus": 0},
    )


def main() -> None:
    args = arguments()
    prompts = read_lines(args.prompts, args.prompts.read_text("utf-8-sig"), ("id", "prompt"))
    if len({row["id"] for row in prompts}) < len(prompts):
        raise SystemExit(f"In {args.prompts}, some ids are given twice, but each must be given once.")
    done = answered(args.out)
    missing = [row for row in prompts if row["id"] not in done]
    if not missing:
        print(f"All {len(prompts)} prompts have their answers.")
        return
    # Answers come block by block: one block for each batch.
    dataset = ray.data.from_items(missing, override_num_blocks=math.ceil(len(missing) / args.batch_size))
    bar = tqdm(total=len(prompts), initial=len(prompts) - len(missing), unit="prompt")
    with args.out.open("a") as out, bar:
        for answer in processor(args)(dataset).iter_rows():
            out.write(json.dumps({key: answer[key] for key in ANSWER}) + "\n")
            out.flush()
            bar.update()


if __name__ == "__main__":
    main()
