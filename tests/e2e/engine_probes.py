"""More functions that tests run in an engine's process with ``Engine.call``; see ``engine_process``."""

from engine_process import Answer, Params, _answer, free_blocks, gsd_request_state, model_runner, scheduler


def generate_and_abort(llm, prompts, params: dict, aborted: list[int], after: int) -> list[Answer | None]:
    """Answers to prompts, of which some are aborted after ``after`` steps; the answer of an aborted prompt is None.

    Args:
        aborted: indices of the prompts to abort. None of them may finish before that.
    """
    engine = llm.llm_engine
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, Params(params).build())
    answers: list[Answer | None] = [None] * len(prompts)
    steps = 0
    while engine.has_unfinished_requests():
        if steps == after:
            done = [index for index in aborted if answers[index] is not None]
            assert not done, f"requests {done} finished before they could be aborted"
            engine.abort_request([str(index) for index in aborted])
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = _answer(output)
        steps += 1
    assert steps > after
    return answers


def steps_with_tokens(llm, prompts, params: dict) -> list[list[int]]:
    """The steps in which each prompt got tokens, counted from 0."""
    engine = llm.llm_engine
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, Params(params).build())
    known, steps, now = [0] * len(prompts), [[] for _ in prompts], 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            index, count = int(output.request_id), len(output.outputs[0].token_ids)
            if count > known[index]:
                steps[index].append(now)
            known[index] = count
        now += 1
        assert now < 1000, "some requests get no tokens"
    return steps


def state_at_rest(llm) -> dict[str, int]:
    """Free KV blocks and requests still known, after a step that tells the worker which requests have finished."""
    llm.llm_engine.step()
    state = {"free_blocks": free_blocks(llm), "waiting": len(scheduler(llm).requests)}
    has_gsd = llm.llm_engine.vllm_config.speculative_config is not None
    return {**state, **(gsd_request_state(llm) if has_gsd else {})}


def attention_groups(llm) -> list[list[str]]:
    """Names of the layers in each attention group of the one KV cache group."""
    (groups,) = model_runner(llm).attn_groups
    return [sorted(group.layer_names) for group in groups]


def split_attention_groups(llm) -> None:
    """Give every layer its own attention group, as vLLM does for layers with different shapes."""
    from vllm.v1.worker.utils import AttentionGroup

    runner = model_runner(llm)
    (groups,), (block_size,) = runner.attn_groups, runner._kernel_block_sizes
    names = [(group, name) for group in groups for name in group.layer_names]
    split = [AttentionGroup(group.backend, [name], group.kv_cache_spec, 0) for group, name in names]
    for group in split:
        group.create_metadata_builders(runner.vllm_config, runner.device, block_size)
    runner.attn_groups[0] = split
    runner.speculation.drafter.model.bind_attention(split)


def forget_prefixes(llm) -> None:
    """Drop all cached prefixes."""
    llm.llm_engine.step()
    assert llm.reset_prefix_cache()


def generate_by_priority(llm, prompts, params: list[Params], priorities: list[int], late: int):
    """Answers to prompts, of which the last ``late`` arrive after the others have run for eight steps.

    Returns:
        The answers, and the indices of the prompts in the order in which they finished.
    """
    engine = llm.llm_engine
    from vllm.sampling_params import RequestOutputKind

    answers: list[Answer | None] = [None] * len(prompts)
    built = [one.build() for one in params]
    for one in built:
        one.output_kind = RequestOutputKind.FINAL_ONLY  # all completions of a prompt at once
    done = []
    steps, arrived = 0, 0
    while arrived < len(prompts) or engine.has_unfinished_requests():
        arriving = len(prompts) if steps >= 8 else len(prompts) - late
        for index in range(arrived, arriving):
            request = {"prompt_token_ids": prompts[index]}
            engine.add_request(str(index), request, built[index], priority=priorities[index])
        arrived = arriving
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id)] = _answer(output)
                done.append(int(output.request_id))
        steps += 1
    return answers, done


def hidden_states_kept(llm, prompt: list[int], max_tokens: int) -> tuple[list[int], list[list[float]]]:
    """A greedy answer, and the stored hidden states of the target for its text, read just before the last step."""
    engine = llm.llm_engine
    runner = model_runner(llm)
    params = Params({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}).build()
    engine.add_request("kept", {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    states: list[list[float]] = []
    while engine.has_unfinished_requests():
        batch = runner.input_batch
        if len(tokens) > 0 and batch.req_ids:
            length = len(prompt) + len(tokens) - 1  # the target has not processed the last token yet
            size = batch.block_table[0].block_size
            blocks = batch.block_table[0].block_table.np[0]
            slots = [int(blocks[place // size]) * size + place % size for place in range(length)]
            states = runner.speculation.features.states[slots].tolist()
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens, states


def draft_pages(llm, prompt: list[int], whole_layer: bool) -> tuple[list, int]:
    """The draft's keys and values in the full KV blocks of a prompt.

    Args:
        whole_layer: run the draft's whole layer over all text, also where keys and values suffice.

    Returns:
        an array for each half of the draft's KV cache, float32, and the number of rows that ran through the layer.
    """
    from unittest.mock import patch

    from vllm_gsd.engine.attention.layers import attention_layers
    from vllm_gsd.ops.kv_move.layout import pages_of

    forget_prefixes(llm)
    runner, engine = model_runner(llm), llm.llm_engine
    drafter = runner.speculation.drafter
    params = Params({"temperature": 0, "max_tokens": 4, "ignore_eos": True}).build()
    engine.add_request("pages", {"prompt_token_ids": prompt}, params)
    text_kv = None if whole_layer else drafter.text_kv
    with patch.object(drafter, "text_kv", text_kv), patch.object(drafter, "ran", wraps=drafter.ran) as ran:
        while not any(output.outputs[0].token_ids for output in engine.step()):
            pass
    table = runner.input_batch.block_table[0]
    blocks = table.block_table.np[0][: len(prompt) // table.block_size]
    layers = attention_layers(runner.vllm_config)
    caches = [layers[name].kv_cache for name in drafter.model.layer_names]
    pages = [page[blocks].float().numpy() for cache in caches for page in pages_of(cache)]
    engine.abort_request(["pages"])
    return pages, sum(call.args[0] for call in ran.call_args_list)


def choose_the_block_size_late() -> None:
    """Make vLLM choose the KV block size after it has loaded the models, as vLLM 0.33 does on CPUs.

    Call this before vLLM starts. The model runner then replaces the batch that it had made for the earlier size.
    """
    from vllm.platforms.cpu import CpuPlatform

    def update_block_size_for_backend(cls, vllm_config):
        vllm_config.cache_config.block_size = 64

    CpuPlatform.update_block_size_for_backend = classmethod(update_block_size_for_backend)


def block_size(llm) -> int:
    """Tokens per KV block of the V1 model runner's batch."""
    return model_runner(llm).input_batch.block_table[0].block_size


def drafts_of_steps(llm, prompt: list[int], max_tokens: int) -> tuple[list[int], list[tuple[int, list[int]]]]:
    """A greedy answer, and the drafts of each step with the number of tokens generated before them."""
    engine, runner, drafted = llm.llm_engine, model_runner(llm), []
    propose = runner.propose_draft_token_ids

    def proposed(*args, **kwargs):
        drafts = propose(*args, **kwargs)
        drafted.extend(drafts if isinstance(drafts, list) else drafts.tolist())
        return drafts

    runner.propose_draft_token_ids = proposed
    params = Params({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}).build()
    engine.add_request("drafts", {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    steps: list[tuple[int, list[int]]] = []
    while engine.has_unfinished_requests():
        drafted.clear()
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
        steps += [(len(tokens), list(drafts)) for drafts in drafted]
    del runner.propose_draft_token_ids
    return tokens, steps
