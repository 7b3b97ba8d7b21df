"""Auxiliary hidden states: those of the target's inner layers, which EAGLE-3, DFlash and DSpark drafts read."""

from types import SimpleNamespace
from typing import Any

from transformers import PretrainedConfig


def aux_layers(draft: PretrainedConfig) -> tuple[int, ...] | None:
    """The layers that a draft's configuration asks for; None if it leaves the choice to the target's model class.

    Layer n is the state that layer n of the target reads; the number of layers stands for the last one's output.
    """
    # On CPUs, modules of V2 must not be imported before its worker has prepared them.
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    speculative: Any = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=draft))
    eagle = getattr(draft, "eagle_config", None) or {}
    # vLLM's own function for V2 leaves out this place, where several public checkpoints have them.
    return (
        get_eagle3_aux_layers_from_config(speculative)
        or tuple(eagle.get("eagle_aux_hidden_state_layer_ids") or ())
        or None
    )


def uses_aux_states(draft: PretrainedConfig) -> bool:
    """Whether an EAGLE-3 head reads auxiliary states; some read the target's last hidden state only."""
    return (getattr(draft, "eagle_config", None) or {}).get("use_aux_hidden_state", True)
