"""Records the drafts of a V2 engine, ours or vLLM's, in each step. These functions run in the engine's process."""

from engine_process import model_runner


def name_layers_apart() -> None:
    """Give the layers of Gemma 4's DSpark draft a prefix: vLLM 0.32 names them like those of a text-only target."""
    from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM

    upstream = Gemma4DSparkForCausalLM.__init__

    def init(self, *, vllm_config, prefix=""):
        upstream(self, vllm_config=vllm_config, prefix=prefix or "draft")

    Gemma4DSparkForCausalLM.__init__ = init


def record_drafts(llm) -> None:
    """Start recording. Our speculator first forgets what it has learned, so that it drafts as a new engine does."""
    speculator, drafts = model_runner(llm).speculator, []
    if hasattr(speculator, "speculation"):
        speculator.speculation.forget_warm_up()
    propose = speculator.propose

    def recorded(*args, **kwargs):
        tokens = propose(*args, **kwargs)
        if not kwargs.get("dummy_run"):
            drafts.append(tokens[0].tolist())
        return tokens

    speculator.propose, speculator.drafts_of_tests = recorded, drafts


def recorded_drafts(llm) -> list[list[int]]:
    """Stop recording, and return the drafts for the first request in each step."""
    speculator = model_runner(llm).speculator
    del speculator.propose
    return speculator.drafts_of_tests
