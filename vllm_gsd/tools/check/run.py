"""All checks, ordered so that a failure explains the later ones."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_gsd.config import GSDConfig, GSDConfigError
from vllm_gsd.config.source import origin_of, read
from vllm_gsd.tools.check.pair import check_pair
from vllm_gsd.tools.check.probes import Finding, ask
from vllm_gsd.tools.errors import ToolError
from vllm_gsd.tools.output import try_file


def check(
    target: str | None, draft: str | None, gsd: str | None, engine_args: dict[str, Any], timeout: float
) -> dict[str, Any]:
    """The report of ``vllm-gsd check``.

    Args:
        target: path or hub id; None skips the models.
        draft: path or hub id that replaces the ``model`` of ``gsd``; None keeps it.
        gsd: path of a gsd.json, or its JSON; None for the defaults.
        engine_args: more of vLLM's ``EngineArgs``.
        timeout: seconds for each process that imports torch or vLLM.

    Returns:
        "ok", "findings" (topic, status, detail) and "memory" of the draft in bytes, empty if unknown.
    """
    with ThreadPoolExecutor() as pool:
        probes = [pool.submit(ask, topic, {}, timeout) for topic in ("vLLM", "kernels")]
        found: list[Finding] = []
        memory: dict[str, Any] = {}
        config: GSDConfig | None = None
        try:
            config = _config(draft, gsd)
            if config.trace is not None:
                try_file(Path(config.trace), '"trace"')
            speculation = f"{config.num_speculative_tokens} nodes, {', '.join(config.sources)}"
            found.append(
                Finding("gsd.json", "ok", speculation if config.speculates else "our CPU kernels, no speculation")
            )
        except (GSDConfigError, ToolError) as error:
            found.append(Finding("gsd.json", "failed", str(error)))
        if target is None:
            found.append(Finding("models", "note", "not checked; give --target"))
        elif config is not None:
            dtypes = (str(engine_args.get(name, "auto")) for name in ("dtype", "kv_cache_dtype"))
            about_pair, memory = check_pair(target, config, *dtypes)
            found += about_pair
        installed = [finding for probe in probes for finding in probe.result()]
    if target is not None and config is not None:
        found += _engine(target, config, engine_args, timeout, usable=passed([*installed, *found]))
    findings = [*installed, *found]
    return {"ok": passed(findings), "findings": [one._asdict() for one in findings], "memory": memory}


def passed(findings: list[Finding]) -> bool:
    """Whether no finding failed."""
    return all(finding.status != "failed" for finding in findings)


def _config(draft: str | None, gsd: str | None) -> GSDConfig:
    keys: dict[str, Any] = {"method": "gsd", "model": None} if gsd is None else read(gsd)
    if draft is not None:
        keys = {**keys, "model": draft}
    return GSDConfig.load(keys, None if gsd is None else origin_of(gsd))


def _engine(target: str, config: GSDConfig, engine_args: dict[str, Any], timeout: float, usable: bool) -> list[Finding]:
    if not usable:
        return [Finding("engine", "unknown", "not checked, because an earlier check failed")]
    given = config.model_dump(mode="json", exclude_unset=True)
    return ask("engine", {"engine_args": {**engine_args, "model": target, "speculative_config": given}}, timeout)
