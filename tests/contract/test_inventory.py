"""The inventory of changes to vLLM is complete, has contract tests, and matches the installed vLLM."""

import ast
import copy
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_upstream_v2
import torch
from transformers import LlamaConfig, PretrainedConfig
from vllm.config.speculative import SpeculativeConfig
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.ernie_mtp import ErnieMTP
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM, Gemma4DSparkModel
from vllm.model_executor.models.glm4_moe_mtp import Glm4MoeMTP
from vllm.model_executor.models.interfaces import SupportsEagle3, SupportsEagleBase
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.mimo_mtp import MiMoMTP
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import (
    CandidateSelector,
    DFlash2Qwen3DecoderLayer,
    DFlash2Qwen3ForCausalLM,
)
from vllm.model_executor.models.qwen3_dspark import Qwen3DSparkForCausalLM
from vllm.model_executor.models.qwen3_eagle3 import Eagle3Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id
from vllm.v1.worker.gpu_model_runner import ExecuteModelState, GPUModelRunner

from vllm_gsd.config.draft_kind import MTP, kind_of_config
from vllm_gsd.engine.draft.aux_states import aux_layers
from vllm_gsd.engine.draft.model import _as_in_vllm
from vllm_gsd.upstream import inventory, parts, patching, symbols, wire
from vllm_gsd.upstream.inventory import PATCHES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from check_walls import violations  # noqa: E402

# Modules that only a worker may import on a CPU. Their sources are read instead.
READ = ("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.", "vllm.v1.executor.ray", "vllm.platforms.cuda")
by_symbol = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.symbol)


@by_symbol
def test_symbol(patch):
    """The installed vLLM has the symbol, with the right kind and parameters, also according to its source."""
    if not patch.module.startswith(READ):
        assert symbols.problem_with(patch) is None
    if patch.when not in ("load", "fallback") and patch.module.startswith("vllm."):
        module = sys.modules.pop(patch.module, None)
        try:
            assert symbols.problem_with(patch, load=False) is None
        finally:
            if module is not None:
                sys.modules[patch.module] = module


@by_symbol
def test_every_entry_is_complete(patch):
    assert all((patch.delta, patch.reason, patch.expiry))
    assert all(text.endswith(".") for text in (patch.delta, patch.reason, patch.expiry))


@by_symbol
def test_its_contract_test_exists(patch):
    file, _, name = patch.contract.partition("::")
    functions = [node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert name in functions


def assigning_functions() -> set[str]:
    """The functions of ``upstream`` that change modules, classes or objects of other packages, as "module.function"."""
    functions = set()
    for file in (ROOT / "vllm_gsd/upstream").glob("*.py"):
        for violation in violations(file.read_text()):
            if not violation.what.startswith(("spells", "exposes", "imports")):
                functions.add(f"{file.stem}.{violation.function}")
    return functions


def replacing_functions() -> dict[str, set[str]]:
    """The functions of ``upstream`` that contain names of vLLM's symbols, with these symbols."""
    functions: dict[str, set[str]] = {}
    for file in (ROOT / "vllm_gsd/upstream").glob("*.py"):
        for function in ast.parse(file.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                named = {
                    node.value
                    for node in ast.walk(function)
                    if isinstance(node, ast.Constant) and re.fullmatch(r"vllm[\w.]+:[\w.]+", str(node.value))
                }
                if named:
                    functions[f"{file.stem}.{function.name}"] = named
    return functions


def test_every_patch_of_the_package_is_in_the_inventory():
    listed = {function for patch in PATCHES for function in patch.by.split()}
    # ``patching`` replaces only symbols of the inventory; the test below checks that it refuses others.
    assigning = {name for name in assigning_functions() if not name.startswith("patching.")}
    assert assigning - listed == set()
    assert len(assigning) > 20  # the search works
    for function, named in replacing_functions().items():
        for symbol in named:
            patch = inventory.patch_of(symbol)
            assert function in patch.by.split() or function == "refusal.install", symbol
    for name in listed:
        module, _, function = name.partition(".")
        body = ast.parse((ROOT / f"vllm_gsd/upstream/{module}.py").read_text()).body
        assert function in [node.name for node in body if isinstance(node, ast.FunctionDef)], name


def test_what_is_not_in_the_inventory_is_not_replaced():
    with pytest.raises(KeyError, match="path"):
        patching.replace("os:path", lambda upstream: None)


def test_symbols_are_listed_once():
    assert len({patch.symbol for patch in PATCHES}) == len(PATCHES)


# --- contracts that no other file tests ---------------------------------------------------------------


def test_a_thinking_budget_has_a_mode_for_speculation():
    assert "self.in_spec_mode = num_spec_tokens > 0" in inspect.getsource(ThinkingBudgetStateHolder.__init__)


def test_masks_of_grammars_are_one_tensor():
    source = inspect.getsource(StructuredOutputManager)
    assert "self._grammar_bitmask: torch.Tensor | None = None" in source
    assert ".allocate_token_bitmask(" in source


def test_drafts_are_kept_where_they_are_set():
    assert "self.spec_token_ids: list[int] = []" in inspect.getsource(Request.__init__)
    assert "request.spec_token_ids = " in inspect.getsource(Scheduler.update_draft_token_ids)


def test_layers_ask_for_the_group_that_is_replaced():
    assert "_TP" in inspect.getsource(parallel_state.get_tp_group)
    assert "get_tensor_model_parallel_world_size()" in inspect.getsource(LinearBase.__init__)


def test_a_group_of_ranks_broadcasts_by_its_device_communicator():
    assert "self.device_communicator = " in inspect.getsource(parallel_state.GroupCoordinator.__init__)
    assert list(inspect.signature(DeviceCommunicatorBase.broadcast).parameters) == ["self", "tensor", "src"]


def test_drafts_say_what_they_have_of_their_own():
    assert {"has_own_embed_tokens", "has_own_lm_head"} <= SupportsEagleBase.__annotations__.keys()


def test_targets_return_the_hidden_states_of_their_inner_layers():
    assert "hidden_states, aux_hidden_states = model_output" in inspect.getsource(GPUModelRunner.execute_model)
    setup = inspect.getsource(GPUModelRunner._setup_eagle3_aux_hidden_state_outputs)
    assert "self._get_eagle3_aux_layers_from_config()" in setup
    assert "self._setup_eagle3_aux_hidden_state_outputs()" in inspect.getsource(CPUModelRunner.load_model)
    assert list(inspect.signature(SupportsEagle3.set_aux_hidden_state_layers).parameters) == ["self", "layers"]
    assert {"hidden_states", "aux_hidden_states"} <= set(ExecuteModelState._fields)


def test_eagle3_heads():
    for head in (Eagle3LlamaForCausalLM, Eagle3Qwen3ForCausalLM):
        assert list(inspect.signature(head.combine_hidden_states).parameters) == ["self", "hidden_states"]
        assert "targets = base + self.draft_id_to_target_id" in inspect.getsource(head.compute_logits)
    override = SpeculativeConfig._maybe_override_draft_max_position_embeddings
    assert list(inspect.signature(override).parameters) == ["draft_hf_config", "target_max_model_len"]
    named = LlamaConfig(max_position_embeddings=64, architectures=["LlamaForCausalLM"], draft_vocab_size=40)
    config = _as_in_vllm(512, named)
    assert (config.max_position_embeddings, config.architectures) == (512, ["Eagle3LlamaForCausalLM"])
    assert aux_layers(SimpleNamespace(eagle_aux_hidden_state_layer_ids=[0, 5, 7])) == (0, 5, 7)
    assert aux_layers(SimpleNamespace(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]})) == (1, 2)
    assert aux_layers(SimpleNamespace(dflash_config={"target_layer_ids": [1, 3]})) == (2, 4)
    assert aux_layers(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("target", "kind", "module"),
    [
        ("MiMoForCausalLM", "mimo", MiMoMTP),
        ("Glm4MoeForCausalLM", "glm4_moe", Glm4MoeMTP),
        ("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ErnieMTP),
    ],
)
def test_mtp_modules(target, kind, module):
    """vLLM builds the module from the target's config.json, and it returns one output for LM head and next level."""
    config = PretrainedConfig(architectures=[target], num_hidden_layers=4, num_nextn_predict_layers=1)
    config.model_type = kind
    config = SpeculativeConfig.hf_config_override(config)
    assert kind_of_config(config.to_dict()) == MTP
    assert ModelRegistry.models[config.architectures[0]].load_model_cls() is module
    assert list(inspect.signature(module.forward).parameters)[1:4] == ["input_ids", "positions", "hidden_states"]
    assert "return hidden_states" in inspect.getsource(module.forward)
    assert "self.embed_tokens = " in inspect.getsource(inspect.getmodule(module))


def test_block_drafts():
    """vLLM's models have the methods that ``BlockDrafter``, ``ContextKV`` and the heads call."""
    for draft in (DFlashQwen3ForCausalLM, DFlash2Qwen3ForCausalLM, Qwen3DSparkForCausalLM):
        assert list(inspect.signature(draft.combine_hidden_states).parameters) == ["self", "hidden_states"]
        assert list(inspect.signature(draft.get_draft_attn_causal).parameters) == ["self"]
        stored = ["self", "context_states", "context_positions", "context_slot_mapping"]
        assert list(inspect.signature(draft.precompute_and_store_context_kv).parameters) == stored
    methods = "compute_draft_logits", "map_draft_to_target", "markov_embed", "markov_bias", "compute_confidence"
    assert all(hasattr(Qwen3DSparkForCausalLM, name) for name in methods)
    arguments = ["self", "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"]
    assert list(inspect.signature(CandidateSelector.forward).parameters) == arguments
    assert "self.lm_head, hidden_states, self.model.candidate_selector.top_k" in inspect.getsource(
        DFlash2Qwen3ForCausalLM.compute_candidates
    )
    assert "block_size=1 + speculative_config.num_speculative_tokens" in inspect.getsource(DFlash2Qwen3DecoderLayer)
    config = SimpleNamespace(dflash_config={"mask_token_id": 7})
    assert get_parallel_drafting_token_id(config) == 7


def test_keys_of_the_context_of_blocks():
    """``drafts.normalise_keys_by_layer`` replaces one method, which gets the keys of all layers."""
    for model in (DFlashQwen3Model, Gemma4DSparkModel):
        source = inspect.getsource(model._normalize_context_k)
        assert "self._k_norm_weights,\n            self._rms_norm_eps," in source
        assert "all_k_normed = self._normalize_context_k(all_k)" in inspect.getsource(
            model.precompute_and_store_context_kv
        )


def test_projections_of_the_context_of_blocks():
    """``drafts.pack_context_projections`` uses what vLLM does if the weights of the layers are not fused."""
    built = inspect.getsource(DFlashQwen3Model._build_context_kv_buffers)
    assert "kv_weights = [a.qkv_proj.weight[a.q_size :] for a in layers_attn]" in built
    assert "torch.cat(kv_weights, dim=0)" in built
    assert "self._fused_kv_bias = None" in built
    applied = inspect.getsource(DFlashQwen3Model._project_context_kv)
    assert "self._context_qkv_projs, self._context_q_sizes, strict=True" in applied
    assert "qkv, _ = proj(normed_context_states)" in applied
    assert "qkv[:, q_size:].view(num_ctx, 2, num_kv_heads, head_dim)" in applied
    assert not hasattr(Gemma4DSparkModel, "_fused_kv_weight")


def test_heads_of_one_layer():
    """What the attention of an EAGLE head reads, and how it computes keys and values, as in ``TextKV``."""
    attention = inspect.getsource(LlamaAttention.forward)
    for line in (
        "qkv, _ = self.qkv_proj(hidden_states)",
        "q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)",
        "q, k = self.rotary_emb(positions, q, k)\n        attn_output = self.attn(q, k, v)",
    ):
        assert line in attention
    eagle, eagle3 = (inspect.getsource(inspect.getmodule(m)) for m in (EagleLlamaForCausalLM, Eagle3LlamaForCausalLM))
    assert "self.fc(torch.cat((input_embeds, hidden_states), dim=-1))" in eagle
    assert "hidden_states = torch.cat([embeds, hidden_states], dim=-1)" in eagle3
    assert "embeds = self.input_layernorm(embeds)" in eagle3
    assert eagle3.count("hidden_states = self.hidden_norm(hidden_states)") == 2  # for both orders of norm and residual


def test_gemma4_dspark():
    """Differences to Qwen3-shaped drafts, by which ``share_ends`` distinguishes them."""
    assert issubclass(Gemma4DSparkForCausalLM, Qwen3DSparkForCausalLM)
    assert Gemma4DSparkForCausalLM.dspark_shares_target_embeddings is False
    assert "process_eagle_weight" not in inspect.getsource(Gemma4DSparkForCausalLM)
    assert "assert all(a.use_k_eq_v for a in layers_attn)" in inspect.getsource(Gemma4DSparkModel)


def test_windows_of_attention_and_of_its_cache():
    """The attention implementation gets the window in its constructor; the layer's own is only for the cache."""
    assert "if self.sliding_window is not None:" in inspect.getsource(Attention.get_kv_cache_spec)
    others = inspect.getsource(Attention).replace(inspect.getsource(Attention.get_kv_cache_spec), "")
    assert re.findall(r"self\.sliding_window\b.*", others) == ["self.sliding_window = sliding_window"]


def test_queues_remove_their_memory_by_its_name():
    source = inspect.getsource(ShmRingBuffer)
    assert "self.is_creator = " in source and "self.shared_memory.unlink()" in source


def test_attention_metadata_take_our_attribute():
    metadata = AttentionMetadata()
    wire.attach(metadata, wire.TREE_ROWS, torch.zeros(1))
    assert wire.attached(metadata, wire.TREE_ROWS) is not None
    assert wire.attached(AttentionMetadata(), wire.TREE_ROWS) is None


def test_speculative_configs_take_our_attribute():
    """Requests are validated with the same config object, or with a copy that keeps its attributes."""
    config = SpeculativeConfig.__new__(SpeculativeConfig)
    wire.allow_traces(SimpleNamespace(speculative_config=config), SimpleNamespace(trace="trace.jsonl"))
    wire.check_request(SamplingParams(extra_args={"gsd_trace": True}), copy.copy(config))
    with pytest.raises(VLLMValidationError, match="allows no traces"):
        wire.check_request(SamplingParams(extra_args={"gsd_trace": True}), SpeculativeConfig.__new__(SpeculativeConfig))


def test_parts_of_a_step_have_these_names():
    assert hasattr(LLMEngine, "step")
    assert all(hasattr(Scheduler, name) for name in parts.SCHEDULER)
    assert all(hasattr(GPUModelRunner, name) for name in parts.RUNNER if name != "_compact")


def test_v2_is_asked_for_what_is_replaced():
    """The runner calls the functions that ``instances.wrap`` replaces."""
    assert "self.model_state.prepare_attn(" in test_upstream_v2.source(test_upstream_v2.RUNNER, "GPUModelRunner")
    assert "cudagraph_manager.dispatch(" in (test_upstream_v2.ROOT / "v1/worker/gpu/dp_utils.py").read_text()


def test_gpus_choose_backends_by_the_priorities_that_are_replaced():
    source = (test_upstream_v2.ROOT / "platforms/cuda.py").read_text()
    assert "backend_priorities = _get_backend_priorities(" in source
    assert "for priority, backend in enumerate(backend_priorities):" in source


def test_the_speculative_config_is_made_by_the_method_that_refuses():
    assert "self.create_speculative_config(" in inspect.getsource(inspect.unwrap(EngineArgs.create_engine_config))
