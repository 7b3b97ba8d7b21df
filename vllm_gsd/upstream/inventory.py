"""Every change that this plugin makes to vLLM, in one table.

``install`` applies the entries marked "load" and checks that the installed vLLM has the symbols. The table also lists
the vLLM objects that carry our own attributes; the ``by`` of such an entry names functions of ``wire``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# The vLLM versions that pass the contract tests.
SUPPORTED_VLLM = "0.32 or 0.33"

# When a change is made:
# "load": when vLLM loads the plugin.
# "fallback": when the plugin loads, but only to reject gsd because another symbol is missing.
# "engine": when an engine with gsd starts; "v1" to "Ray" do so only for one model runner, device or executor.
# "tools": when one of our command-line tools runs.
When = Literal["load", "fallback", "engine", "v1", "v2", "v2 on a CPU", "CPU", "Ray", "tools"]
Kind = Literal["attribute", "class", "function", "method", "property", "static method"]


class Patch(NamedTuple):
    """One vLLM symbol that the plugin wraps, replaces or assigns to."""

    symbol: str  # "module:qualified name"
    by: str  # the functions of vllm_gsd.upstream that make the change, as "module.function", separated by spaces
    when: When
    delta: str
    reason: str
    expiry: str
    contract: str  # the test in tests/contract that fails when upstream changes the symbol, as "file::test"
    kind: Kind = "class"
    parameters: tuple[str, ...] = ()  # the parameters of a function that we rely on

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def path(self) -> str:
        return self.symbol.partition(":")[2]

    @property
    def dotted(self) -> str:
        """The symbol as a dotted path, for messages and documentation."""
        return self.symbol.replace(":", ".")


PATCHES = (
    # --- when the plugin is loaded; configurations without gsd pass through unchanged ------------------
    Patch(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        by="hooks.add_cli_args hooks.with_option_type",
        when="load",
        delta="--speculative-config accepts the path of a JSON file as well as JSON text.",
        reason="Upstream parses the value as JSON only.",
        expiry="Upstream accepts a path here, as it does for --config.",
        contract="test_upstream.py::test_signature",
        kind="static method",
        parameters=("parser",),
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        by="hooks.create_engine_config",
        when="load",
        delta='Translates "method": "gsd" for upstream, and rejects engine settings that gsd does not support.',
        reason="SpeculativeConfig rejects unknown keys and accepts a fixed list of methods.",
        expiry="Upstream has a registry of speculative methods.",
        contract="test_upstream.py::test_fields",
        kind="method",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        by="hooks.make_room_for_lora",
        when="load",
        delta="With LoRA, a step has room to verify a full graph of every request (max_num_batched_tokens).",
        reason="With LoRA and speculative decoding, upstream rejects a smaller value, and its default is smaller.",
        expiry="Upstream's default is large enough.",
        contract="test_upstream.py::test_signature",
        kind="method",
    ),
    Patch(
        "vllm.config:VllmConfig.num_lookahead_tokens",
        by="hooks.reserve_draft_slots",
        when="load",
        delta="Reserves KV slots for the nodes that the draft model runs.",
        reason='Upstream reserves no lookahead slots for the method "custom_class".',
        expiry="A proposer can declare how many lookahead slots it needs.",
        contract="test_upstream.py::test_signature",
        kind="property",
    ),
    Patch(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        by="hooks.accept_all_sampling_params",
        when="load",
        delta="Accepts requests with min_p or logit_bias, and refuses gsd_trace where no trace is allowed.",
        reason="Upstream rejects min_p and logit_bias with any speculative method, because its rejection sampler does "
        "not apply them.",
        expiry="Upstream lets the speculative method decide.",
        contract="test_upstream.py::test_processors_are_built_by_the_name_that_is_wrapped",
        kind="method",
        parameters=("speculative_config",),
    ),
    Patch(
        "vllm.v1.metrics.loggers:PrometheusStatLogger._kv_connector_cls",
        by="hooks.report_metrics",
        when="load",
        delta="Exports the vllm:gsd_* metrics on vLLM's Prometheus endpoint.",
        reason="Upstream has no hook for a proposer's metrics.",
        expiry="Upstream adds such a hook.",
        contract="test_upstream.py::test_metric_hooks",
    ),
    Patch(
        "vllm.v1.metrics.loggers:KVConnectorLogging",
        by="hooks.leave_metrics_out_of_logs",
        when="load",
        delta="Keeps the gsd metrics out of the log lines about KV transfers.",
        reason="The gsd metrics travel in the field for KV-connector statistics.",
        expiry="Upstream adds a hook for a proposer's metrics.",
        contract="test_upstream.py::test_metric_hooks",
    ),
    # --- to reject gsd when one of the symbols above is missing ----------------------------------------
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        by="refusal.refusing_method",
        when="fallback",
        delta="Rejects gsd with one clear sentence if create_engine_config is missing.",
        reason="Without this change the user would see an unrelated error.",
        expiry="The change to create_engine_config is no longer needed.",
        contract="test_inventory.py::test_symbol",
        kind="method",
    ),
    Patch(
        "vllm.config.speculative:SpeculativeConfig.__init__",
        by="refusal.refusing_keys",
        when="fallback",
        delta="Rejects gsd with one clear sentence if both create_engine_config and the method above are missing.",
        reason="Without this change the user would see an unrelated error.",
        expiry="The change to create_engine_config is no longer needed.",
        contract="test_inventory.py::test_symbol",
        kind="method",
    ),
    Patch(
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args",
        by="refusal.refusing_arguments",
        when="fallback",
        delta="Rejects gsd on the command line with one clear sentence if add_cli_args is missing.",
        reason="Without this change the user would see an unrelated error.",
        expiry="The change to add_cli_args is no longer needed.",
        contract="test_inventory.py::test_symbol",
        kind="method",
        parameters=("args",),
    ),
    # --- in engines with gsd ---------------------------------------------------------------------------
    Patch(
        "sys:excepthook",
        by="hooks.end_in_one_sentence",
        when="engine",
        delta="If the command line asked for gsd, a GSDConfigError prints one sentence instead of a traceback.",
        reason="Errors that are found after argument parsing would otherwise end in a traceback.",
        expiry="Upstream's command line prints configuration errors without a traceback.",
        contract="test_inventory.py::test_symbol",
        kind="attribute",
    ),
    Patch(
        "vllm.config.scheduler:SchedulerConfig.scheduler_cls",
        by="hooks.create_engine_config",
        when="engine",
        delta="Selects our asynchronous scheduler after upstream has enabled asynchronous scheduling.",
        reason="The scheduler class must be given before upstream decides whether scheduling is asynchronous.",
        expiry="A speculative method can name its scheduler class.",
        contract="test_upstream_v2.py::test_async_scheduling_has_a_scheduler_of_its_own",
        kind="attribute",
    ),
    Patch(
        "vllm.config.parallel:ParallelConfig.distributed_executor_backend",
        by="hooks.create_engine_config",
        when="Ray",
        delta="Selects our Ray executor on CPUs.",
        reason="Upstream's Ray executor needs a device type that Ray schedules, and the CPU platform has none.",
        expiry="Upstream's CPU platform names its Ray device.",
        contract="test_upstream_ray.py::test_executors_may_be_classes",
        kind="attribute",
    ),
    Patch(
        "vllm.config.vllm:VllmConfig.additional_config",
        by="wire.note_packed_weights",
        when="CPU",
        delta="Records how weights are packed for our CPU kernel.",
        reason="Compiled code depends on it, and vLLM names its compile cache after the configuration.",
        expiry="Never: upstream provides this field for plugins.",
        contract="test_upstream.py::test_fields",
        kind="attribute",
    ),
    Patch(
        "vllm.v1.worker.cpu_worker:CPUModelRunner",
        by="workers.building_v1_runner",
        when="v1",
        delta="The CPU worker builds our V1 model runner.",
        reason="The worker refers to the runner class by its module-level name.",
        expiry="A worker can be told its runner class.",
        contract="test_upstream.py::test_worker_builds_the_runner_by_module_name",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        by="workers.building_v1_runner",
        when="v1",
        delta="Builds all logits processors (min_p, logit_bias, custom ones), as without speculative decoding.",
        reason="Upstream omits them with any speculative method.",
        expiry="Upstream lets the speculative method decide.",
        contract="test_upstream.py::test_processors_are_built_by_the_name_that_is_wrapped",
        kind="function",
        parameters=("vllm_config",),
    ),
    Patch(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        by="workers.building_v2_cpu_runner",
        when="v2 on a CPU",
        delta="The CPU worker builds our V2 model runner.",
        reason="The worker refers to the runner class by its module-level name.",
        expiry="A worker can be told its runner class.",
        contract="test_upstream_v2.py::test_the_cpu_worker_builds_the_runner_by_the_names_that_are_replaced",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner:init_speculator",
        by="workers.building_speculator",
        when="v2",
        delta="The V2 model runner builds our speculator.",
        reason="The model runner refers to the factory function by its module-level name.",
        expiry="Model Runner V2 accepts a speculator class.",
        contract="test_upstream_v2.py::test_the_cpu_worker_builds_the_runner_by_the_names_that_are_replaced",
        kind="function",
    ),
    Patch(
        "vllm.v1.attention.backends.registry:register_backend",
        by="workers.attention_backends",
        when="engine",
        delta="Registers our attention backends under the names of upstream's while the model's layers are built.",
        reason="This keeps --attention-backend and upstream's own choice of backend working.",
        expiry="Never: upstream provides this registry for that purpose.",
        contract="test_upstream.py::test_signature",
        kind="function",
        parameters=("backend", "class_path"),
    ),
    Patch(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        by="instances.wrap_prepare_attn",
        when="v2",
        delta="Adds the tree mask to the attention metadata.",
        reason="The model runner builds this metadata without calling the speculator.",
        expiry="The speculator can contribute to the attention metadata.",
        contract="test_upstream_v2.py::test_a_model_state_prepares_attention_with_these",
        kind="method",
        parameters=("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
        by="instances.wrap_dispatch",
        when="v2",
        delta="Counts forward passes that replay a CUDA graph and forward passes that no CUDA graph fits.",
        reason="Upstream does not count them.",
        expiry="Upstream counts them.",
        contract="test_inventory.py::test_v2_is_asked_for_what_is_replaced",
        kind="method",
    ),
    Patch(
        "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder",
        by="instances.count_thinking_as_without_speculation",
        when="v1",
        delta="Turns in_spec_mode off while the walk samples.",
        reason="The walk samples one row per request; upstream's speculative mode expects a row per draft token.",
        expiry="The sampler takes the mode as an argument.",
        contract="test_inventory.py::test_a_thinking_budget_has_a_mode_for_speculation",
    ),
    Patch(
        "vllm.v1.structured_output:StructuredOutputManager",
        by="structured.reserve_masks structured.allow_all",
        when="engine",
        delta="Allocates and fills _grammar_bitmask along the paths of a token graph.",
        reason="Upstream fills the masks along a chain of draft tokens only.",
        expiry="Upstream supports trees of draft tokens.",
        contract="test_inventory.py::test_masks_of_grammars_are_one_tensor",
    ),
    Patch(
        "vllm.v1.request:Request",
        by="structured.set_drafts",
        when="engine",
        delta="Sets spec_token_ids to the nodes of the graph that the request's grammar allows.",
        reason="Upstream checks draft tokens against the grammar as a chain.",
        expiry="Upstream supports trees of draft tokens.",
        contract="test_inventory.py::test_drafts_are_kept_where_they_are_set",
    ),
    Patch(
        "vllm.v1.core.sched.output:SchedulerOutput.scheduled_spec_decode_tokens",
        by="structured.set_scheduled_drafts",
        when="engine",
        delta="Replaces a request's draft tokens with the nodes of its graph and marks none of them invalid.",
        reason="Upstream checks draft tokens against the grammar as a chain.",
        expiry="Upstream supports trees of draft tokens.",
        contract="test_upstream.py::test_fields",
        kind="attribute",
    ),
    Patch(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats.num_draft_tokens",
        by="instances.count_draft_tokens",
        when="engine",
        delta="Counts all nodes of a graph as draft tokens, while acceptance is reported per depth.",
        reason="Upstream treats the index in the list of draft tokens as the depth.",
        expiry="Upstream supports trees of draft tokens.",
        contract="test_upstream.py::test_signature",
        kind="attribute",
    ),
    Patch(
        "vllm.distributed.parallel_state:_TP",
        by="drafts.tensor_parallel_group",
        when="engine",
        delta="Holds the draft's tensor-parallel group while a draft with its own tensor-parallel size is loaded.",
        reason="Layers read the global group when they are constructed and store its size.",
        expiry="Layers take their group as an argument.",
        contract="test_inventory.py::test_layers_ask_for_the_group_that_is_replaced",
        kind="attribute",
    ),
    Patch(
        "vllm.config.speculative:SpeculativeConfig.draft_model_config",
        by="drafts.with_draft_config",
        when="engine",
        delta="Holds the draft's model configuration, in the draft's own copy of the speculative config.",
        reason="Upstream's EAGLE and DFlash models read their shape from there, the latter also the size of a block.",
        expiry="EAGLE models read the configuration that they are constructed with.",
        contract="test_inventory.py::test_symbol",
        kind="attribute",
    ),
    Patch(
        "vllm.model_executor.models.interfaces:SupportsEagleBase",
        by="drafts.share_ends",
        when="engine",
        delta="Gives an EAGLE or DFlash draft the target's embedding and LM head if it has none of its own or a copy.",
        reason="Each of upstream's proposers does this in its own code.",
        expiry="Upstream provides a function that shares them.",
        contract="test_inventory.py::test_drafts_say_what_they_have_of_their_own",
    ),
    Patch(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
        by="drafts.take_logits",
        when="engine",
        delta="Sets logits_as_input for a draft with a trimmed LM head.",
        reason="We compute the trimmed logits, and the model still applies its scale and soft cap.",
        expiry="Never: upstream provides this attribute for that purpose.",
        contract="test_upstream.py::test_lm_heads_of_ones_own_rows",
    ),
    Patch(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        by="weights.packing",
        when="CPU",
        delta="Layers multiply with our kernel where it is the faster one.",
        reason="Layers look the function up by name.",
        expiry="Upstream has a registry of CPU matrix kernels.",
        contract="test_upstream.py::test_weights_are_packed_here",
        kind="function",
        parameters=("layer", "remove_weight"),
    ),
    Patch(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        by="weights.pack_lm_heads",
        when="CPU",
        delta="LM heads, and the embeddings tied to them, store only the packed copy of their weights.",
        reason="Upstream stores both the packed and the original weights.",
        expiry="Upstream has a registry of CPU matrix kernels.",
        contract="test_upstream.py::test_weights_are_packed_here",
    ),
    Patch(
        "vllm.v1.executor.ray_executor_v2:RayWorkerProc",
        by="ray_ranks.ranks_on_cpus",
        when="Ray",
        delta="The Ray executor starts our actor class.",
        reason="The executor refers to the actor class by its module-level name.",
        expiry="Upstream's CPU platform names its Ray device.",
        contract="test_upstream_ray.py::test_the_executor_makes_the_actors_that_we_put_in_its_module",
    ),
    Patch(
        "vllm.platforms.interface:Platform.ray_device_key",
        by="ray_ranks.devices_are_cpus",
        when="Ray",
        delta='Is "CPU" on the CPU platform while ranks are placed.',
        reason="The CPU platform does not name its Ray device.",
        expiry="Upstream's CPU platform names its Ray device.",
        contract="test_upstream_ray.py::test_the_cpu_platform_has_no_device_in_ray",
        kind="attribute",
    ),
    Patch(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        by="ray_ranks.keep_shared_memory_to_nodes",
        when="Ray",
        delta="Adds the node's identifier to the name of the shared memory.",
        reason="Over TCP all nodes use the same name, so ranks on different nodes would deadlock.",
        expiry="Upstream includes the node in the name.",
        contract="test_upstream_ray.py::test_shared_memory_is_named_by_the_rendezvous",
        kind="static method",
        parameters=("communicator",),
    ),
    Patch(
        "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer",
        by="ray_ranks.forget_name",
        when="Ray",
        delta="Unlinks the shared memory as soon as every rank has opened it, and clears is_creator.",
        reason="Ray kills an actor together with the process that would have unlinked the memory.",
        expiry="Upstream unlinks the memory itself.",
        contract="test_inventory.py::test_queues_remove_their_memory_by_its_name",
    ),
    # --- our data on vLLM's objects --------------------------------------------------------------------
    Patch(
        "vllm.v1.outputs:ModelRunnerOutput",
        by="wire.attach_stats",
        when="engine",
        delta="An attribute carries a step's statistics to the scheduler.",
        reason="The class has no field for a proposer's statistics.",
        expiry="Upstream adds such a field.",
        contract="test_upstream.py::test_model_runner_output_takes_our_attribute",
    ),
    Patch(
        "vllm.v1.metrics.stats:SchedulerStats.kv_connector_stats",
        by="wire.attach_metrics",
        when="engine",
        delta="Carries the gsd metrics to the front end.",
        reason="It is the only field on that path that holds an arbitrary dict.",
        expiry="Upstream adds a field for a proposer's metrics.",
        contract="test_upstream.py::test_fields",
        kind="attribute",
    ),
    Patch(
        "vllm.v1.core.sched.output:SchedulerOutput",
        by="wire.attach_salts wire.attach_kept",
        when="engine",
        delta="Attributes carry cache salts, and the nodes that grammars allow, to the workers.",
        reason="The class has no fields for them.",
        expiry="Upstream adds such fields.",
        contract="test_upstream.py::test_draft_tokens_and_scheduler_output_take_our_attributes",
    ),
    Patch(
        "vllm.v1.outputs:DraftTokenIds",
        by="wire.attach_proposed wire.attach_parents",
        when="engine",
        delta="Attributes carry the graphs of requests with structured output to the scheduler.",
        reason="Its draft tokens are a list, which upstream treats as a chain.",
        expiry="Upstream supports trees of draft tokens.",
        contract="test_upstream.py::test_draft_tokens_and_scheduler_output_take_our_attributes",
    ),
    Patch(
        "vllm.v1.attention.backend:AttentionMetadata",
        by="wire.attach_tree_rows",
        when="engine",
        delta="An attribute carries the rows that attend through the tree mask.",
        reason="The class has no field for a mask.",
        expiry="Upstream adds such a field.",
        contract="test_inventory.py::test_attention_metadata_take_our_attribute",
    ),
    # --- in engines that our tools start ---------------------------------------------------------------
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
        by="forwards.watch forwards.unwatch",
        when="tools",
        delta="vllm-gsd distill records the hidden states of the target's forward passes; it wraps execute_model too.",
        reason="Recording them avoids a second forward pass over the generated text.",
        expiry="Upstream returns hidden states.",
        contract="test_upstream.py::test_signature",
        kind="method",
        parameters=("positions",),
    ),
    Patch(
        "vllm.v1.engine.llm_engine:LLMEngine.step",
        by="parts.wrap_parts",
        when="tools",
        delta="vllm-gsd bench times this method and the methods that it calls (see upstream/parts.py).",
        reason="The benchmark reports how long each part of a step takes.",
        expiry="Upstream's traces separate the parts of a step.",
        contract="test_inventory.py::test_parts_of_a_step_have_these_names",
        kind="method",
    ),
)


def patches(*when: When) -> list[Patch]:
    """All entries with one of these values of ``when``."""
    return [patch for patch in PATCHES if patch.when in when]


def patch_of(symbol: str) -> Patch:
    """The entry of a symbol, given as "module:qualified name".

    Raises:
        KeyError: the symbol is not in the inventory.
    """
    for patch in PATCHES:
        if patch.symbol == symbol:
            return patch
    raise KeyError(symbol)
