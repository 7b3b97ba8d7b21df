"""Answer a list of questions in this process, and print the number of tokens per step."""

import argparse

from vllm import LLM, SamplingParams

from vllm_gsd.tools.models import built_in_pair

QUESTIONS = [
    "Why is the sky blue?",
    "Name three rivers.",
    "Count from one to twenty in words.",
    "What is a prime number?",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="by default the built-in pair's")
    parser.add_argument("--draft", help="by default the built-in pair's")
    parser.add_argument("--budget", type=int, help="nodes verified per request; by default what pays on this machine")
    parser.add_argument("--eager", action="store_true", help="start faster, but answer slower")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    pair = built_in_pair()
    budget = {} if args.budget is None else {"budget": args.budget}
    llm = LLM(
        args.target or str(pair.target),
        speculative_config={"method": "gsd", "model": args.draft or str(pair.draft), **budget},
        enforce_eager=args.eager,
        max_model_len=2048,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 29,
        disable_log_stats=False,
    )
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}\n  {output.outputs[0].text}")
    counters = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    tokens, steps = counters["vllm:generation_tokens"], counters["vllm:gsd_target_steps"]
    print(f"{tokens:.0f} tokens, {tokens / steps:.2f} per request and step")


if __name__ == "__main__":
    main()
