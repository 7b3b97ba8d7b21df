"""Edit code twice. Both edits copy from their prompts (n-gram matches), and the second also from the first answer.

For that, the sources in the server's gsd.json must include ``"shared"``. ``examples/serve.py`` includes it if
arctic-inference is installed.
"""

import os
import urllib.request

from openai import OpenAI

CODE = '''class Stack:
    """The last item that was pushed is the first to be popped."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()
'''
EDITS = ("rename `items` to `contents`", "rename `items` to `values`")
COUNTERS = ("generation_tokens", "gsd_target_steps", "gsd_nodes_accepted_ngram", "gsd_nodes_accepted_shared")

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id


def counters() -> list[float]:
    """The server's counters so far, which include other clients' requests."""
    url = str(client.base_url).removesuffix("/v1/") + "/metrics"
    with urllib.request.urlopen(url) as page:
        lines = page.read().decode().splitlines()
    return [
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}_total{{"))
        for name in COUNTERS
    ]


for edit in EDITS:
    before = counters()
    question = f"Rewrite this file with one small change: {edit}. Print the whole file.\n\n```python\n{CODE}```"
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=160
    )
    tokens, steps, own, shared = (int(now - then) for now, then in zip(counters(), before, strict=True))
    print(answer.choices[0].message.content)
    print(f"{edit}: {tokens} tokens in {steps} steps; copied {own} from its own text, {shared} from other answers\n")
