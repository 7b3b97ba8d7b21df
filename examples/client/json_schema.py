"""Ask for JSON that follows a schema. The grammar constrains every path of the graph; forced tokens need no draft."""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
        "coast": {"type": "boolean"},
    },
    "required": ["name", "continent", "coast"],
    "additionalProperties": False,
}

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1"), api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[
        {"role": "user", "content": "Describe Portugal as JSON: its name, continent, and whether it has a coast."}
    ],
    response_format={"type": "json_schema", "json_schema": {"name": "country", "schema": SCHEMA}},
    temperature=0,
    max_tokens=200,
)
print(json.loads(answer.choices[0].message.content))
