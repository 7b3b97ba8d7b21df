"""Let the model call a function, run it here, and let the model answer with its result."""

import json
import os

from openai import OpenAI


def get_weather(city: str) -> str:
    """A stand-in for a weather service."""
    return {"Oslo": "snow, -3 degrees", "Rome": "sun, 24 degrees"}[city]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,  # the arguments follow the schema
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
# A model as small as the built-in one does not call tools by itself, so the request requires a call.
answer = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=100
)
for call in answer.choices[0].message.tool_calls:
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"{call.function.name}({arguments}) = {result}")
    messages.append({"role": "user", "content": f"The weather service says: {result}. Tell me in a sentence."})
answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
print(answer.choices[0].message.content)
