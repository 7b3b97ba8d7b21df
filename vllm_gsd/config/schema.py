"""``GSDConfig``: the keys of ``gsd.json``, with all checks that need no engine. Does not import vLLM.

Every mistake raises a ``GSDConfigError``. Its message is one sentence that names the key, the given value and what is
allowed, since users read it at the end of a server's log.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_gsd.config.draft_check import check_draft
from vllm_gsd.config.source import fail, is_inline, is_path, origin_of, read, shown, with_underscores

METHOD = "gsd"
# Keys that vLLM's SpeculativeConfig has too. They do not show that a config is ours.
_SHARED_KEYS = {"method", "model", "num_speculative_tokens", "draft_tensor_parallel_size"}
# Keys that mean nothing without a draft model.
_OF_DRAFTS = ("draft_tensor_parallel_size", "draft_vocab_size")
_PAPER = {"top_k": 4, "theta_prob": 0.2, "theta_sib": 0.3}
_PAPER_SHOWN = ", ".join(f"{key} {value}" for key, value in _PAPER.items())

Source = Literal["draft", "ngram", "shared"]


def _either(values: Iterable[Any], last: str = "or") -> str:
    """Join values as JSON for a sentence: '"a", "b" or null'."""
    *some, end = (json.dumps(value) for value in values)
    return f"{', '.join(some)} {last} {end}" if some else end


class GSDConfig(BaseModel):
    """The keys that a user may set. Build it with ``load``, whose errors are written for users."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    # Messages, the command's help and the documentation are generated from these fields. In json_schema_extra,
    # "allowed" and "default" replace what types and bounds would say, and "null" is the meaning of null.
    method: Literal["gsd"] = Field(description="Selects graph-structured speculative decoding.")
    model: str | None = Field(
        pattern=r"\S",
        description="The draft: a language model with the target's vocabulary, an EAGLE or EAGLE-3 head or a DSpark, "
        "DFlash2 or DFlash draft made for the target, or the target itself, whose MTP module then drafts.",
        json_schema_extra={"allowed": "a path or hub id of a draft model, or null for none"},
    )
    num_speculative_tokens: int = Field(
        16,
        ge=1,
        le=256,
        description="Maximum number of nodes of the flattened graph that the target verifies per request and step. It "
        "also limits the length of a drafted block.",
    )
    max_depth: int = Field(
        6,
        ge=1,
        le=32,
        description="Maximum number of draft levels, or of depths that a graph takes from a drafted block. Merged "
        "nodes and copies from texts can make paths of a graph longer.",
    )
    top_k: int = Field(8, ge=1, le=32, description="Maximum number of candidates that the draft gives a node.")
    theta_prob: float = Field(
        0.02, ge=0, le=1, description="A node is not expanded if it is reached with a lower probability than this."
    )
    theta_sib: float = Field(
        0.03,
        ge=0,
        le=1,
        description="A sibling is dropped if its probability is below this share of its best sibling's.",
    )
    merge_ngram: int = Field(
        2,
        ge=0,
        le=16,
        description="Tokens that must agree for two nodes to be merged; 0 turns merging off. In a drafted block, nodes "
        "of a depth are merged if their tokens agree, unless it is 0.",
    )
    sources: tuple[Source, ...] = Field(
        default_factory=lambda earlier: ("draft", "ngram") if earlier.get("model") else ("ngram",),
        description="Where hypotheses come from: the draft model, n-gram matches of the request's own text, or "
        "finished responses to other requests. An empty list serves plain decoding by our CPU kernels.",
        json_schema_extra={
            "allowed": f"a list with some of {_either(get_args(Source), 'and')}, or without a model an empty one",
            "default": '["draft", "ngram"], or ["ngram"] without a model',
        },
    )
    shared_responses: int = Field(
        1000, ge=1, le=1_000_000, description='Maximum number of finished responses that the source "shared" keeps.'
    )
    budget: int | Literal["auto"] = Field(
        "auto",
        description='"auto" drafts and verifies in each step as much as pays (on Model Runner V2 it decides by graphs '
        "that are a step or two old); a number drafts every level and verifies that many nodes.",
        json_schema_extra={"allowed": '"auto" or a whole number from 1 to "num_speculative_tokens"'},
    )
    draft_tensor_parallel_size: int | None = Field(
        None,
        ge=1,
        description="Tensor-parallel size of the draft. It must be the target's; for a language model it may also "
        "be 1, which gives each rank a whole copy.",
        json_schema_extra={"null": "the target's"},
    )
    draft_vocab_size: int | None = Field(
        None,
        ge=32,
        description="For how many tokens the draft's LM head computes logits: the first ones of draft_vocab.json in "
        "the draft's folder or, without that file, those with the lowest ids.",
        json_schema_extra={"null": "the draft's own"},
    )
    preset: Literal["paper"] | None = Field(
        None, description=f'"paper" sets the thresholds of the paper ({_PAPER_SHOWN}), each unless the config sets it.'
    )
    tree_attention: Literal["kernel", "flash_prefix", "xformers"] = Field(
        "kernel",
        description="On GPUs, what attends along a graph: our kernel, vLLM's FlashAttention for the prefix merged with "
        "our kernel for the tree, or xformers.",
    )
    cpu_kernels: Literal["auto", "off"] = Field(
        "auto",
        description='On CPUs, "auto" takes our matrix products and our attention where they are faster than vLLM\'s; '
        '"off" leaves both to vLLM, except the attention of rows that branch. GPUs have no such kernels.',
    )
    trace: str | None = Field(
        None,
        min_length=1,
        description='A file to which the engine appends steps and texts of requests that ask for it by "gsd_trace".',
        json_schema_extra={"allowed": "the path of a file, or null to refuse such requests"},
    )

    @property
    def speculates(self) -> bool:
        """Whether there is a source of hypotheses; without one our CPU kernels serve plain decoding."""
        return bool(self.sources)

    @classmethod
    def load(cls, value: Any, origin: str | None = None) -> GSDConfig:
        """Build a config from the path of a JSON file, an inline JSON object or a dict.

        Args:
            value: the path, the JSON or the dict; '-' in a key means '_', as in vLLM.
            origin: name of the value's origin in messages, if the caller has already read it.

        Raises:
            GSDConfigError: the config has a mistake; the message names the first one.
        """
        origin = origin or origin_of(value)
        keys = with_underscores(value if isinstance(value, dict) else read(value), origin)
        _check_keys(keys, origin)
        try:
            return cls.model_validate(keys)
        except ValidationError as error:
            fail(_clause(error, keys), origin)

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("preset") == "paper":
            return {**_PAPER, **data}
        return data

    @field_validator("sources", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("sources")
    @classmethod
    def _check_sources(cls, value: tuple[Source, ...]) -> tuple[Source, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f'"sources" is {shown(value)}, but must name each source once')
        if "shared" in value and importlib.util.find_spec("arctic_inference") is None:
            raise ValueError(
                '"sources" has "shared", which needs the package arctic-inference; install it or leave "shared" out'
            )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> GSDConfig:
        if self.model is None and "draft" in self.sources:
            raise ValueError('"sources" has "draft" while "model" is null; name a model or leave "draft" out')
        if not self.speculates:
            self._check_without_sources()
        if self.model is not None and "draft" not in self.sources:
            raise ValueError(
                f'"sources" is {shown(self.sources)}, which never uses the "model" {shown(self.model)}; '
                'add "draft" or set "model" to null'
            )
        fields = type(self).model_fields
        for key in _OF_DRAFTS if self.model is None and self.speculates else ():
            if (given := getattr(self, key)) != fields[key].default:
                raise ValueError(f'"{key}" is {shown(given)} while "model" is null; name a model or leave "{key}" out')
        if "shared" not in self.sources and self.shared_responses != fields["shared_responses"].default:
            raise ValueError(
                f'"shared_responses" is {self.shared_responses} while "sources" is {shown(self.sources)}; '
                'add "shared" or leave "shared_responses" out'
            )
        most = self.num_speculative_tokens
        if self.budget != "auto" and not 1 <= self.budget <= most:
            raise ValueError(f'"budget" is {shown(self.budget)}, but must be {allowed("budget")}, here {most}')
        return self

    def _check_without_sources(self) -> None:
        """Refuse all other keys: they are about speculation, or switch off our CPU kernels, which alone are left."""
        if self.model is not None:
            raise ValueError(
                f'"sources" is empty while "model" is {shown(self.model)}, but must be {allowed("sources")}'
            )
        fields = type(self).model_fields
        for key in ("preset", *fields):  # a preset sets other keys
            given = getattr(self, key)
            if key not in ("method", "model", "sources") and given != fields[key].default:
                raise ValueError(
                    f'"{key}" is {shown(given)} while "sources" is empty, which leaves nothing but our CPU kernels; '
                    f'name a source or leave "{key}" out'
                )


def allowed(key: str) -> str:
    """The allowed values of a key of ``gsd.json``, as text for messages and the documentation."""
    field = GSDConfig.model_fields[key]
    extra = extra_of(key)
    if "allowed" in extra:
        return extra["allowed"]
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    if names := [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]:
        return _either([*names, None] if NoneType in kinds else names)
    low, high = (
        next((getattr(bound, name) for bound in field.metadata if hasattr(bound, name)), None) for name in ("ge", "le")
    )
    number = f"a {'whole ' if int in kinds else ''}number "
    bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
    return number + bounds + (f", or null for {extra['null']}" if NoneType in kinds else "")


def extra_of(key: str) -> dict[str, str]:
    """The key's additional texts "allowed", "default" and "null"; see ``GSDConfig``."""
    extra = GSDConfig.model_fields[key].json_schema_extra
    return {name: str(said) for name, said in extra.items()} if isinstance(extra, dict) else {}


def is_gsd(value: Any) -> bool:
    """Whether a speculative config selects method "gsd". All other configs are left to vLLM.

    Args:
        value: the path of a JSON file, an inline JSON text, or a parsed one.

    Raises:
        GSDConfigError: the config clearly means "gsd" but misspells it, or is a path that cannot be read.
    """
    origin = origin_of(value)
    if is_inline(value):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            # Only a broken config of ours is reported here.
            if f'"{METHOD}"' in value:
                read(value)
            return False
    elif is_path(value):
        value = read(value)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return False
    keys = {key.replace("-", "_"): given for key, given in value.items()}
    if keys.get("method") == METHOD:
        return True
    if _means_gsd(keys):
        _check_keys(keys, origin)
    return False


def check_draft_model(config: GSDConfig, target_vocab_size: int, target: str | os.PathLike[str] | None = None) -> None:
    """Check the config's draft model without loading weights; arguments and errors are those of ``check_draft``.

    The check passes if its ``model`` is null.
    """
    if config.model is not None:
        check_draft(config.model, target_vocab_size, target, config.draft_vocab_size)


def _means_gsd(keys: dict[str, Any]) -> bool:
    """Whether keys without the method "gsd" can only mean it.

    Another spelling of the same letters can only mean it. A similar name could be a method of vLLM or of another plugin
    ("gdn"), unless the config has keys that only this method has.
    """
    method = keys.get("method")
    has_our_keys = bool(keys.keys() & (GSDConfig.model_fields.keys() - _SHARED_KEYS))
    if isinstance(method, str):
        letters = "".join(filter(str.isalnum, method)).lower()
        return letters == METHOD or (has_our_keys and bool(difflib.get_close_matches(letters, [METHOD])))
    if has_our_keys:
        return True
    return any(isinstance(given, str) and given == METHOD and key != "model" for key, given in keys.items())


def _check_keys(keys: dict[str, Any], origin: str) -> None:
    known = list(GSDConfig.model_fields)
    if "method" in keys and keys["method"] != METHOD:
        fail(f'"method" is {shown(keys["method"])}, but must be {allowed("method")}', origin)
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"the nearest is {shown(near[0])}" if near else "they are " + ", ".join(known)
            fail(f'{shown(key)} is not one of the keys of method "gsd"; {hint}', origin)
    for key in ("method", "model"):
        if key not in keys:
            fail(f'"{key}" is missing, but must be {allowed(key)}', origin)


def _clause(error: ValidationError, keys: dict[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    key = str(first["loc"][0])
    return f'"{key}" is {shown(keys[key])}, but must be {allowed(key)}'
