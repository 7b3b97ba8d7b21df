"""The methods of the comparison, and the settings to try for each."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.config.draft_check import kind_of_model
from vllm_gsd.config.draft_kind import LANGUAGE_MODEL, MTP
from vllm_gsd.tools.errors import ToolError

METHODS = ("plain", "draft_model", "eagle", "ngram", "suffix", "kernels", "gsd-off", "gsd", "gsd-tree", "gsd-chain")
# Our CPU kernels without a draft. Only a draft's upkeep tells "gsd-off" from it.
KERNELS = "kernels"
BY_DEFAULT = [method for method in METHODS if method != KERNELS]
# The engine of "gsd" with every request opted out of the graph.
OFF = "gsd-off"
MODES = ("eager", "compiled")
# The keys that restrict the graph to a tree and to a chain.
FORMS: dict[str, dict[str, Any]] = {
    "gsd": {},
    "gsd-tree": {"merge_ngram": 0},
    "gsd-chain": {"merge_ngram": 0, "top_k": 1},
}
# Lengths of the suffix that vLLM's ngram method looks up.
NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
# Methods of vLLM's with other names than the kinds of their drafts, and kinds that only its runner for GPUs takes.
NAMES, ON_GPUS = {"dflash2": "dflash", MTP: "mtp"}, ("dspark", "dflash2")


def with_off(methods: list[str]) -> list[str]:
    """These methods, with ``gsd-off`` before the first form of the graph, so that a report shows its own gain."""
    place = next((place for place, method in enumerate(methods) if method in FORMS), None)
    if place is None or OFF in methods:
        return methods
    return [*methods[:place], OFF, *methods[place:]]


@dataclass(frozen=True)
class Drafts:
    """Folders of the drafts that methods use. Each may be None."""

    own: str | None  # the graph's
    chain: str | None  # a language model, for vLLM's draft_model
    eagle: str | None  # one that reads the target's hidden states, for vLLM's eagle, eagle3, dspark or dflash

    @classmethod
    def of(cls, own: str | None, language_model: str | None = None) -> Drafts:
        """The drafts for each method. vLLM's draft_model uses ``language_model`` if ``own`` is not one."""
        if own is None:
            return cls(None, language_model, None)
        if kind_of_model(own) == LANGUAGE_MODEL:
            return cls(own, own, None)
        return cls(own, language_model, own)


@dataclass(frozen=True)
class Setting:
    """One way to run an engine."""

    method: str  # one of METHODS
    detail: str  # distinguishes settings of one method, such as "K=2"
    speculative: dict[str, Any] | None  # vLLM's speculative_config
    compiled: bool
    opted_out: bool = False  # whether every request opts out of the graph

    @property
    def engine(self) -> Setting:
        """The setting to start the engine with. Runs that opt out share the engine of those that do not."""
        return replace(self, method="gsd", opted_out=False) if self.opted_out else self

    @property
    def name(self) -> str:
        """Unique among the settings of a run."""
        return " ".join(filter(None, (self.method, self.detail, "compiled" if self.compiled else "eager")))


def settings_of(
    method: str,
    *,
    drafts: Drafts,
    gsd: dict[str, Any],
    lengths: list[int],
    modes: list[str],
    keeps_answers: bool = True,
) -> list[Setting]:
    """The settings to try for a method.

    Args:
        gsd: keys of gsd.json for all forms of the graph.
        lengths: numbers of speculative tokens to try for vLLM's chains.
        modes: a subset of MODES.
        keeps_answers: whether ``suffix`` copies from other requests' answers too, not only from a request's own text.

    Raises:
        ToolError: the method or a mode is unknown.
        GSDConfigError: ``gsd`` has a mistake.
    """
    if method not in METHODS:
        raise ToolError(f'"{method}" is not a method of the comparison; they are {", ".join(METHODS)}.')
    if wrong := [mode for mode in modes if mode not in MODES]:
        raise ToolError(f'--modes has "{wrong[0]}", but allowed are {" and ".join(MODES)}.')
    configs: dict[str, dict[str, Any] | None] = {"": None}
    kind = drafts.eagle and kind_of_model(drafts.eagle)
    chains: dict[str, dict[str, Any]] = {
        "draft_model": {"model": drafts.chain},
        "eagle": {"model": drafts.eagle, "method": kind and NAMES.get(kind, kind)},
        "ngram": NGRAM,
    }
    if (more := chains.get(method)) is not None:
        configs = {f"K={k}": {"method": method, "num_speculative_tokens": k, **more} for k in lengths}
    elif method == "suffix":
        configs = {"": {"method": "suffix", **({} if keeps_answers else {"suffix_decoding_max_cached_requests": 0})}}
    elif method == KERNELS:
        kernels = {key: gsd[key] for key in gsd if key == "cpu_kernels"}
        configs = {"": {"method": "gsd", "model": None, "sources": [], **kernels}}
    elif method != "plain":
        configs = {"": checked(drafts.own, {**gsd, **FORMS.get(method, {})})}
    return [
        Setting(method, detail, config, mode == "compiled", opted_out=method == OFF)
        for detail, config in configs.items()
        for mode in modes
    ]


def checked(model: str | None, gsd: dict[str, Any]) -> dict[str, Any]:
    """The speculative config of a draft with more keys of gsd.json, after the checks that need no engine.

    Raises:
        GSDConfigError: a key or a value is wrong.
    """
    if gsd.get("sources") == []:
        raise GSDConfigError(
            '"sources" in --gsd is empty, so there is no graph to measure; name a source, or leave it out and add '
            '"kernels" to --methods.'
        )
    config = {"method": "gsd", "model": model, **gsd}
    try:
        GSDConfig.load(config, "--gsd")
    except GSDConfigError as error:  # --gsd has no "model"
        raise GSDConfigError(str(error).replace('set "model" to null', "give --target without --draft")) from None
    return config


def missing_for(method: str, drafts: Drafts) -> str | None:
    """The reason why a method cannot run here, or None if it can."""
    if method == "draft_model" and drafts.chain is None:
        return "needs a draft that is a language model"
    if method == "eagle" and drafts.eagle is None:
        return "needs a draft that reads the target's hidden states"
    kind = drafts.eagle and kind_of_model(drafts.eagle)
    if method == "eagle" and kind in ON_GPUS and not _has_gpu():
        return f"needs a GPU for drafts of kind {kind}"
    if method == KERNELS and _has_gpu():
        return "multiplies on CPUs only"
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        return "needs the package arctic-inference"
    return None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
