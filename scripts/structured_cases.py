"""Grammars for ``check_structured``, each with an instruction and a check that is independent of the grammar backend.

All have bounded lengths, numbers of items and ranges, so every text ends well within the token limit.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TOPICS = [
    "the sea",
    "cooking",
    "a small village",
    "space travel",
    "football",
    "a rainy Monday",
    "old computers",
    "birds",
    "a library",
    "trains",
]


@dataclass(frozen=True)
class Case:
    """One grammar: the key and value of ``StructuredOutputsParams``, and a check of the text."""

    name: str
    kind: str  # json, regex, choice or grammar
    value: Any
    instruction: str
    check: Callable[[str], object]  # raises or returns a false value for an invalid text


def _object(**properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _json(name: str, schema: dict, instruction: str) -> Case:
    def check(text: str) -> bool:
        import jsonschema

        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        return True

    return Case(name, "json", json.dumps(schema), instruction + " Answer in JSON. The topic: {topic}.", check)


def _regex(name: str, pattern: str, instruction: str) -> Case:
    return Case(name, "regex", pattern, instruction + " The topic: {topic}.", re.compile(pattern).fullmatch)


def _choice(name: str, choices: list[str], instruction: str) -> Case:
    return Case(name, "choice", choices, instruction + " The topic: {topic}.", choices.__contains__)


def _grammar(name: str, ebnf: str, instruction: str, check: Callable[[str], object]) -> Case:
    return Case(name, "grammar", ebnf, instruction + " The topic: {topic}.", check)


WORD = {"type": "string", "minLength": 1, "maxLength": 12}
SENTENCE = {"type": "string", "maxLength": 60}
COLOUR = {"enum": ["red", "green", "blue", "yellow"]}
JSON = [
    _json(
        "person",
        _object(name=WORD, age={"type": "integer", "minimum": 0, "maximum": 120}, colour=COLOUR),
        "Describe a person.",
    ),
    _json(
        "shopping",
        {"type": "array", "items": {"enum": ["apple", "bread", "milk", "tea"]}, "minItems": 2, "maxItems": 5},
        "Write a shopping list.",
    ),
    _json(
        "nested",
        _object(title=WORD, author=_object(first=WORD, last=WORD), in_print={"type": "boolean"}),
        "Describe a book.",
    ),
    _json(
        "list-of-objects",
        {
            "type": "array",
            "items": _object(item=WORD, count={"type": "integer", "minimum": 1, "maximum": 99}),
            "minItems": 1,
            "maxItems": 3,
        },
        "Take an inventory.",
    ),
    _json(
        "any-of",
        _object(value={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}, WORD]}),
        "Give one value.",
    ),
    _json(
        "optional-keys",
        {
            "type": "object",
            "properties": {"city": WORD, "country": WORD, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "Write an address.",
    ),
    _json(
        "references",
        {
            "$defs": {"point": _object(x={"type": "integer", "minimum": -9, "maximum": 9}, label=COLOUR)},
            **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
        },
        "Describe a line.",
    ),
    _json("constants", _object(version={"const": 1}, kind={"const": "event"}, text=SENTENCE), "Write an event."),
    _json(
        "tuple",
        {"type": "array", "prefixItems": [COLOUR, {"type": "boolean"}], "items": False, "minItems": 2, "maxItems": 2},
        "Give a colour and whether it is liked.",
    ),
    _json(
        "tool-call",
        _object(
            tool={"enum": ["search", "calculator"]},
            arguments=_object(query=SENTENCE, limit={"type": "integer", "minimum": 1, "maximum": 20}),
        ),
        "Call a tool.",
    ),
]
REGEX = [
    _regex("date", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "When did it happen?"),
    _regex("address", r"[a-z]{1,10}@[a-z]{1,10}\.(com|org|net)", "Make up a mail address."),
    _regex("phone", r"\+[1-9][0-9]{0,2} [0-9]{3} [0-9]{4}", "Make up a phone number."),
    _regex("hex-colour", r"#[0-9a-f]{6}", "Which colour?"),
    _regex("version", r"v[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{1,2}(-(alpha|beta))?", "Which version?"),
    _regex("sentence", r"(The|A) [a-z]{2,9} (is|was) (very )?[a-z]{3,9}\.", "Say one thing."),
]
CHOICE = [
    _choice("yes-no", ["yes", "no"], "Is it nice?"),
    _choice("overlapping", ["certainly yes", "certainly not", "certain", "maybe"], "Will it last?"),
    _choice("long", ["I agree with all of that.", "I agree with some of that.", "I don't agree."], "Do you agree?"),
    _choice("stars", ["1 star", "2 stars", "3 stars", "4 stars", "5 stars"], "Rate it."),
]


def _is_sum(text: str) -> bool:
    left, right = text.split(" = ")
    return 2 <= len(left.split(" + ")) <= 4 and all(re.fullmatch("[0-9]{1,3}", n) for n in [*left.split(" + "), right])


def _is_address(text: str) -> bool:
    parts = text.split(".")
    return len(parts) == 4 and all(re.fullmatch("[0-9]|[1-9][0-9]{1,2}", part) and int(part) < 256 for part in parts)


def _is_balanced(text: str) -> bool:
    """Whether the text has one to three nested pairs of brackets around letters."""
    depth = 0
    while text.startswith("(") and text.endswith(")"):
        text, depth = text[1:-1], depth + 1
    return 1 <= depth <= 3 and re.fullmatch("[xyz]{1,4}", text) is not None


def _is_query(text: str) -> bool:
    words = text.split()
    columns, table = {"id", "name", "price"}, {"users", "orders"}
    end = words.index("from")
    listed = " ".join(words[1:end]).split(", ")
    rest = words[end + 2 :]
    condition = not rest or (rest[0] == "where" and rest[1] in columns and rest[2] in "<>=" and rest[3].isdigit())
    return words[0] == "select" and set(listed) <= columns and words[end + 1] in table and condition


GRAMMAR = [
    _grammar(
        "sum", 'root ::= number (" + " number){1,3} " = " number\nnumber ::= [0-9]{1,3}', "Add some numbers.", _is_sum
    ),
    _grammar(
        "ip-address",
        'root ::= byte "." byte "." byte "." byte\n'
        'byte ::= "25" [0-5] | "2" [0-4] [0-9] | "1" [0-9] [0-9] | [1-9] [0-9] | [0-9]',
        "Give an IP address.",
        _is_address,
    ),
    _grammar(
        "brackets",
        'root ::= "(" inner ")"\ninner ::= letters | "(" deep ")"\ndeep ::= letters | "(" letters ")"\n'
        "letters ::= [xyz]{1,4}",
        "Write letters in brackets.",
        _is_balanced,
    ),
    _grammar(
        "query",
        'root ::= "select " column (", " column){0,2} " from " table (" where " column " " [<>=] " " [0-9]{1,3})?\n'
        'column ::= "id" | "name" | "price"\ntable ::= "users" | "orders"',
        "Write a query.",
        _is_query,
    ),
    _grammar(
        "moves",
        'root ::= move (" " move){1,5}\nmove ::= [KQRBN]? [a-h] [1-8] [+#]?',
        "Play some chess moves.",
        re.compile(r"[KQRBN]?[a-h][1-8][+#]?( [KQRBN]?[a-h][1-8][+#]?){1,5}").fullmatch,
    ),
]
CASES = [*JSON, *REGEX, *CHOICE, *GRAMMAR]
