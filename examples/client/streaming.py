"""Stream an answer. A piece of the stream has all tokens of a step, so there are fewer pieces than tokens."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id

pieces = 0
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Count from one to twenty in words."}],
    temperature=0,
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        pieces += 1
        print(chunk.choices[0].delta.content, end="", flush=True)
    if chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens in {pieces} pieces")
