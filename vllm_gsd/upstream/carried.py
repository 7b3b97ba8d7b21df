"""The part of the ``inventory`` that lists vLLM objects which carry our data. ``by`` names functions of ``wire``."""

from vllm_gsd.upstream.patch import Patch

CARRIED = (
    Patch(
        "vllm.v1.outputs:ModelRunnerOutput",
        by="wire.attach",
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
        by="wire.attach",
        when="engine",
        delta="Attributes carry cache salts, and the nodes that grammars allow, to the workers.",
        reason="The class has no fields for them.",
        expiry="Upstream adds such fields.",
        contract="test_upstream.py::test_draft_tokens_and_scheduler_output_take_our_attributes",
    ),
    Patch(
        "vllm.v1.outputs:DraftTokenIds",
        by="wire.attach",
        when="engine",
        delta="Attributes carry the graphs of requests with structured output to the scheduler.",
        reason="Its draft tokens are a list, which upstream treats as a chain.",
        expiry="Upstream supports trees of draft tokens.",
        contract="test_upstream.py::test_draft_tokens_and_scheduler_output_take_our_attributes",
    ),
    Patch(
        "vllm.v1.attention.backend:AttentionMetadata",
        by="wire.attach",
        when="engine",
        delta="An attribute carries the rows that attend through the tree mask.",
        reason="The class has no field for a mask.",
        expiry="Upstream adds such a field.",
        contract="test_inventory.py::test_attention_metadata_take_our_attribute",
    ),
    Patch(
        "vllm.config.speculative:SpeculativeConfig",
        by="wire.attach",
        when="engine",
        delta="An attribute tells the front end that requests may be traced.",
        reason="It is all of an engine's configuration that request validation sees.",
        expiry="Upstream validates requests with the engine's whole configuration.",
        contract="test_inventory.py::test_speculative_configs_take_our_attribute",
    ),
)
