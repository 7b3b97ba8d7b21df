"""What this plugin changes in vLLM: one table, which ``install`` and the check for missing symbols work from.

Beside the patches it lists where something of ours rides on vLLM's objects (``by`` names functions of ``wire`` then).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# Versions whose symbols pass the contract tests.
SUPPORTED_VLLM = "0.32 or 0.33"

# When a symbol is changed: where the plugin is loaded; to refuse gsd where another symbol is missing; where an engine
# with gsd starts, always or with a certain runner, device or executor; by our tools.
When = Literal["load", "fallback", "engine", "v1", "v2", "v2 on a CPU", "CPU", "Ray", "tools"]
Kind = Literal["attribute", "class", "function", "method", "property", "static method"]


class Patch(NamedTuple):
    """One symbol that is wrapped, replaced or assigned to."""

    symbol: str  # "module:name in it"
    by: str  # the functions of this package that do it, "module.function", separated by spaces
    when: When
    delta: str
    reason: str
    expiry: str
    contract: str  # the test in tests/contract that fails when upstream changes, "file::test"
    kind: Kind
    parameters: tuple[str, ...] = ()  # of a function, those that we use

    @property
    def module(self) -> str:
        return self.symbol.partition(":")[0]

    @property
    def path(self) -> str:
        return self.symbol.partition(":")[2]

    @property
    def dotted(self) -> str:
        """As users read it."""
        return self.symbol.replace(":", ".")


PATCHES = (
    # --- where the plugin is loaded; other configs are passed on untouched ---------------------------
    Patch(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        by="hooks.add_cli_args hooks.with_option_type",
        when="load",
        delta="The option --speculative-config takes a path too.",
        reason="Upstream parses its value as JSON only.",
        expiry="Upstream accepts a path, as it does for --config.",
        contract="test_upstream.py::test_signature",
        kind="static method",
        parameters=("parser",),
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        by="hooks.create_engine_config",
        when="load",
        delta='"method": "gsd" becomes a method that upstream knows; engines that gsd cannot serve are refused.',
        reason="SpeculativeConfig rejects unknown keys, and its methods are a closed list.",
        expiry="Upstream has a registry of speculative methods.",
        contract="test_upstream.py::test_fields",
        kind="method",
    ),
    Patch(
        "vllm.engine.arg_utils:EngineArgs._set_default_max_num_seqs_and_batched_tokens_args",
        by="hooks.make_room_for_lora",
        when="load",
        delta="With LoRA a batch holds all rows that every request can have.",
        reason="Upstream refuses a smaller one beside LoRA and speculation, and its defaults are smaller.",
        expiry="Upstream's defaults are large enough.",
        contract="test_upstream.py::test_signature",
        kind="method",
    ),
    Patch(
        "vllm.config:VllmConfig.num_lookahead_tokens",
        by="hooks.reserve_draft_slots",
        when="load",
        delta="KV slots are reserved for drafted nodes.",
        reason='Upstream\'s margin is 0 for "custom_class".',
        expiry="A proposer can state its own margin.",
        contract="test_upstream.py::test_signature",
        kind="property",
    ),
    Patch(
        "vllm.sampling_params:SamplingParams._validate_spec_decode",
        by="hooks.accept_all_sampling_params",
        when="load",
        delta="min_p and logit_bias are accepted beside a graph.",
        reason="Upstream refuses them beside any speculation, because its rejection sampler leaves them out.",
        expiry="Upstream asks the method.",
        contract="test_upstream.py::test_processors_are_built_by_the_name_that_is_wrapped",
        kind="method",
        parameters=("speculative_config",),
    ),
    Patch(
        "vllm.v1.metrics.loggers:PrometheusStatLogger._kv_connector_cls",
        by="hooks.report_metrics",
        when="load",
        delta="Our counters are in the Prometheus endpoint.",
        reason="There is no hook for a proposer's metrics.",
        expiry="There is one.",
        contract="test_upstream.py::test_metric_hooks",
        kind="class",
    ),
    Patch(
        "vllm.v1.metrics.loggers:KVConnectorLogging",
        by="hooks.leave_metrics_out_of_logs",
        when="load",
        delta="Our counters are left out of what KV connectors log.",
        reason="They travel where a KV connector's numbers do.",
        expiry="There is a hook for a proposer's metrics.",
        contract="test_upstream.py::test_metric_hooks",
        kind="class",
    ),
    # --- to refuse gsd, where one of those is missing ------------------------------------------------
    Patch(
        "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        by="refusal.refusing_method",
        when="fallback",
        delta="gsd is refused here where create_engine_config is missing.",
        reason="The user is told in one sentence.",
        expiry="With create_engine_config's.",
        contract="test_inventory.py::test_symbol",
        kind="method",
    ),
    Patch(
        "vllm.config.speculative:SpeculativeConfig.__init__",
        by="refusal.refusing_keys",
        when="fallback",
        delta="gsd is refused here where both methods above are missing.",
        reason="The user is told in one sentence.",
        expiry="With create_engine_config's.",
        contract="test_inventory.py::test_symbol",
        kind="method",
    ),
    Patch(
        "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_args",
        by="refusal.refusing_arguments",
        when="fallback",
        delta="gsd is refused here where add_cli_args is missing.",
        reason="The user is told in one sentence.",
        expiry="With add_cli_args's.",
        contract="test_inventory.py::test_symbol",
        kind="method",
        parameters=("args",),
    ),
    # --- of engines with gsd -------------------------------------------------------------------------
    Patch(
        "sys:excepthook",
        by="hooks.end_in_one_sentence",
        when="engine",
        delta="Where the command line asked for gsd, a GSDConfigError ends the program with one sentence.",
        reason="What is refused after parsing would end in a traceback.",
        expiry="Upstream's command line prints such errors itself.",
        contract="test_inventory.py::test_symbol",
        kind="attribute",
    ),
    Patch(
        "vllm.config.scheduler:SchedulerConfig.scheduler_cls",
        by="hooks.create_engine_config",
        when="engine",
        delta="Our scheduler for async scheduling, once upstream has chosen that.",
        reason="The class is asked for before it is known which one is needed.",
        expiry="A speculative method can name its scheduler.",
        contract="test_upstream_v2.py::test_async_scheduling_has_a_scheduler_of_its_own",
        kind="attribute",
    ),
    Patch(
        "vllm.config.parallel:ParallelConfig.distributed_executor_backend",
        by="hooks.create_engine_config",
        when="Ray",
        delta="Our executor on CPUs.",
        reason="Upstream's Ray executor needs devices that Ray knows.",
        expiry="The CPU platform has a device in Ray.",
        contract="test_upstream_ray.py::test_executors_may_be_classes",
        kind="attribute",
    ),
    Patch(
        "vllm.config:VllmConfig.additional_config",
        by="wire.note_packed_weights",
        when="CPU",
        delta="Says whether weights are packed for our kernel.",
        reason="Compiled code depends on it, and its cache is named after the configuration.",
        expiry="Never: the field is for plugins.",
        contract="test_upstream.py::test_fields",
        kind="attribute",
    ),
    Patch(
        "vllm.v1.worker.cpu_worker:CPUModelRunner",
        by="workers.building_v1_runner",
        when="v1",
        delta="The worker builds our runner.",
        reason="The worker names the class.",
        expiry="A worker can name its runner's class.",
        contract="test_upstream.py::test_worker_builds_the_runner_by_module_name",
        kind="class",
    ),
    Patch(
        "vllm.v1.worker.gpu_model_runner:build_logitsprocs",
        by="workers.building_v1_runner",
        when="v1",
        delta="Logits processors are built as without speculation: min_p, logit_bias and custom ones among them.",
        reason="Upstream leaves them out beside any speculation.",
        expiry="Upstream asks the method.",
        contract="test_upstream.py::test_processors_are_built_by_the_name_that_is_wrapped",
        kind="function",
        parameters=("vllm_config",),
    ),
    Patch(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        by="workers.building_v2_cpu_runner",
        when="v2 on a CPU",
        delta="The worker builds our runner.",
        reason="The worker names the class.",
        expiry="A worker can name its runner's class.",
        contract="test_upstream_v2.py::test_the_cpu_worker_builds_the_runner_by_the_names_that_are_replaced",
        kind="class",
    ),
    Patch(
        "vllm.v1.worker.gpu.model_runner:init_speculator",
        by="workers.building_speculator",
        when="v2",
        delta="The model runner builds our speculator.",
        reason="The model runner names the function.",
        expiry="Model Runner V2 takes speculators by their class.",
        contract="test_upstream_v2.py::test_the_cpu_worker_builds_the_runner_by_the_names_that_are_replaced",
        kind="function",
    ),
    Patch(
        "vllm.v1.attention.backends.registry:register_backend",
        by="workers.take_over_attention",
        when="engine",
        delta="Our attention backends stand under the names of upstream's.",
        reason="--attention-backend and upstream's own choice go on working.",
        expiry="Never: the registry is made for that.",
        contract="test_upstream.py::test_signature",
        kind="function",
        parameters=("backend", "class_path"),
    ),
    Patch(
        "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
        by="instances.wrap_prepare_attn",
        when="v2",
        delta="Adds the tree mask to attention metadata.",
        reason="The model runner asks its model state for them, between two of our methods.",
        expiry="A speculator is asked for attention metadata.",
        contract="test_upstream_v2.py::test_a_model_state_prepares_attention_with_these",
        kind="method",
        parameters=("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "attn_groups"),
    ),
    Patch(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
        by="instances.wrap_dispatch",
        when="v2",
        delta="Counts the graphs that are replayed, and the steps that none fits.",
        reason="Upstream does not count them.",
        expiry="It does.",
        contract="test_upstream_v2.py::test_a_speculators_graphs_are_found_and_captured",
        kind="method",
    ),
    Patch(
        "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder",
        by="instances.count_thinking_as_without_speculation",
        when="v1",
        delta="in_spec_mode is off while a walk samples.",
        reason="Rows are one per request here, as without speculation, not drafts as in the rejection sampler.",
        expiry="The sampler takes it as an argument.",
        contract="test_inventory.py::test_a_thinking_budget_has_a_mode_for_speculation",
        kind="class",
    ),
    Patch(
        "vllm.v1.structured_output:StructuredOutputManager",
        by="structured.reserve_masks structured.allow_all",
        when="engine",
        delta="_grammar_bitmask is allocated and filled along the paths of a graph.",
        reason="Upstream fills masks along a chain only.",
        expiry="Upstream takes trees of draft tokens.",
        contract="test_inventory.py::test_masks_of_grammars_are_one_tensor",
        kind="class",
    ),
    Patch(
        "vllm.v1.request:Request",
        by="structured.set_drafts",
        when="engine",
        delta="spec_token_ids are those that a grammar allows along a graph.",
        reason="Upstream cuts drafts as a chain.",
        expiry="Upstream takes trees of draft tokens.",
        contract="test_inventory.py::test_drafts_are_kept_where_they_are_set",
        kind="class",
    ),
    Patch(
        "vllm.v1.core.sched.output:SchedulerOutput.scheduled_spec_decode_tokens",
        by="structured.set_scheduled_drafts",
        when="engine",
        delta="Tokens are those of a graph, and none of them counts as invalid.",
        reason="Upstream cuts drafts as a chain.",
        expiry="Upstream takes trees of draft tokens.",
        contract="test_upstream.py::test_fields",
        kind="attribute",
    ),
    Patch(
        "vllm.v1.spec_decode.metrics:SpecDecodingStats.num_draft_tokens",
        by="instances.count_draft_tokens",
        when="engine",
        delta="Counts the nodes of a graph, while a position is a depth.",
        reason="Upstream takes places in the list of draft tokens for positions.",
        expiry="Upstream takes trees of draft tokens.",
        contract="test_upstream.py::test_signature",
        kind="attribute",
    ),
    Patch(
        "vllm.distributed.parallel_state:_TP",
        by="drafts.tensor_parallel_group",
        when="engine",
        delta="While a draft of another tensor-parallel size is loaded, this is its group.",
        reason="Layers ask for the group when they are made, and remember its size.",
        expiry="Layers take their group as an argument.",
        contract="test_inventory.py::test_layers_ask_for_the_group_that_is_replaced",
        kind="attribute",
    ),
    Patch(
        "vllm.config.speculative:SpeculativeConfig.draft_model_config",
        by="drafts.with_draft_config",
        when="engine",
        delta="In a copy for the draft: the draft's model.",
        reason="Upstream's EAGLE models look for their own shape there.",
        expiry="They read the configuration they are built with.",
        contract="test_inventory.py::test_symbol",
        kind="attribute",
    ),
    Patch(
        "vllm.model_executor.models.interfaces:SupportsEagleBase",
        by="drafts.share_ends",
        when="engine",
        delta="A draft of EAGLE's kind has the target's embedding and LM head where it has none.",
        reason="Upstream's proposers do so, each for itself.",
        expiry="Upstream has a function for it.",
        contract="test_inventory.py::test_drafts_say_what_they_have_of_their_own",
        kind="class",
    ),
    Patch(
        "vllm.model_executor.layers.logits_processor:LogitsProcessor",
        by="drafts.take_logits",
        when="engine",
        delta="logits_as_input is on for a draft with a trimmed LM head.",
        reason="What comes after the LM head (scale, soft cap) is the model's own business still.",
        expiry="Never: the attribute is for that.",
        contract="test_upstream.py::test_lm_heads_of_ones_own_rows",
        kind="class",
    ),
    Patch(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        by="weights.packing",
        when="CPU",
        delta="Layers multiply by our kernel, where it is the faster one.",
        reason="Layers look the function up by name.",
        expiry="There is a registry of CPU kernels.",
        contract="test_upstream.py::test_weights_are_packed_here",
        kind="function",
        parameters=("layer", "remove_weight"),
    ),
    Patch(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
        by="weights.pack_lm_heads",
        when="CPU",
        delta="LM heads, and embeddings tied to them, keep their weights packed only.",
        reason="Upstream keeps them twice.",
        expiry="There is a registry of CPU kernels.",
        contract="test_upstream.py::test_weights_are_packed_here",
        kind="class",
    ),
    Patch(
        "vllm.v1.executor.ray_executor_v2:RayWorkerProc",
        by="ray_ranks.ranks_on_cpus",
        when="Ray",
        delta="The executor makes our actors.",
        reason="The executor names the class.",
        expiry="The CPU platform has a device in Ray.",
        contract="test_upstream_ray.py::test_the_executor_makes_the_actors_that_we_put_in_its_module",
        kind="class",
    ),
    Patch(
        "vllm.platforms.interface:Platform.ray_device_key",
        by="ray_ranks.devices_are_cpus",
        when="Ray",
        delta='"CPU" on the CPU platform, while ranks are placed.',
        reason="The CPU platform has no name for its devices in Ray.",
        expiry="It has one.",
        contract="test_upstream_ray.py::test_the_cpu_platform_has_no_device_in_ray",
        kind="attribute",
    ),
    Patch(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
        by="ray_ranks.keep_shared_memory_to_nodes",
        when="Ray",
        delta="The name of shared memory has the node in it.",
        reason="Over TCP the name is the same on every node, and ranks on several nodes would wait for one another.",
        expiry="Upstream asks for the node.",
        contract="test_upstream_ray.py::test_shared_memory_is_named_by_the_rendezvous",
        kind="static method",
        parameters=("communicator",),
    ),
    Patch(
        "vllm.distributed.device_communicators.shm_broadcast:ShmRingBuffer",
        by="ray_ranks.forget_name",
        when="Ray",
        delta="Shared memory loses its name once all ranks have it: is_creator is off.",
        reason="Ray ends an actor with everything that would have removed the memory.",
        expiry="Upstream removes the name itself.",
        contract="test_inventory.py::test_queues_remove_their_memory_by_its_name",
        kind="class",
    ),
    # --- what rides on vLLM's objects ----------------------------------------------------------------
    Patch(
        "vllm.v1.outputs:ModelRunnerOutput",
        by="wire.attach_stats",
        when="engine",
        delta="An attribute carries a step's statistics to the scheduler.",
        reason="There is no field for a proposer's.",
        expiry="There is one.",
        contract="test_upstream.py::test_model_runner_output_takes_our_attribute",
        kind="class",
    ),
    Patch(
        "vllm.v1.metrics.stats:SchedulerStats.kv_connector_stats",
        by="wire.attach_metrics",
        when="engine",
        delta="Carries our counters to the front end.",
        reason="It is the one field that is an open dict on the way there.",
        expiry="There is a field for a proposer's metrics.",
        contract="test_upstream.py::test_fields",
        kind="attribute",
    ),
    Patch(
        "vllm.v1.core.sched.output:SchedulerOutput",
        by="wire.attach_salts wire.attach_kept",
        when="engine",
        delta="Attributes carry cache salts, and which nodes grammars have left, to the workers.",
        reason="There are no fields for them.",
        expiry="There are.",
        contract="test_upstream.py::test_draft_tokens_and_scheduler_output_take_our_attributes",
        kind="class",
    ),
    Patch(
        "vllm.v1.outputs:DraftTokenIds",
        by="wire.attach_proposed wire.attach_parents",
        when="engine",
        delta="Attributes carry graphs of requests with structured output to the scheduler.",
        reason="Draft tokens are a list, which upstream takes for a chain.",
        expiry="Upstream takes trees of draft tokens.",
        contract="test_upstream.py::test_draft_tokens_and_scheduler_output_take_our_attributes",
        kind="class",
    ),
    Patch(
        "vllm.v1.attention.backend:AttentionMetadata",
        by="wire.attach_tree_rows",
        when="engine",
        delta="An attribute carries the rows that attend along a graph.",
        reason="Metadata have no field for a mask.",
        expiry="They have one.",
        contract="test_inventory.py::test_attention_metadata_take_our_attribute",
        kind="class",
    ),
    # --- of our tools, in engines that they start ----------------------------------------------------
    Patch(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
        by="forwards.watch forwards.unwatch",
        when="tools",
        delta="vllm-gsd distill keeps the hidden states of the target's forwards; execute_model is wrapped too.",
        reason="Answers need no second forward then.",
        expiry="Upstream gives hidden states back.",
        contract="test_upstream.py::test_signature",
        kind="method",
        parameters=("positions",),
    ),
    Patch(
        "vllm.v1.engine.llm_engine:LLMEngine.step",
        by="parts.wrap_parts",
        when="tools",
        delta="vllm-gsd bench times it, and what it calls (parts.METHODS).",
        reason="A step's parts are told apart.",
        expiry="Upstream's own traces tell them apart.",
        contract="test_inventory.py::test_parts_of_a_step_have_these_names",
        kind="method",
    ),
)


def patches(*when: When) -> list[Patch]:
    """The patches that are made then."""
    return [patch for patch in PATCHES if patch.when in when]


def patch_of(symbol: str) -> Patch:
    """The entry of a symbol, "module:name in it".

    Raises:
        KeyError: the symbol is not in the inventory.
    """
    for patch in PATCHES:
        if patch.symbol == symbol:
            return patch
    raise KeyError(symbol)
