"""Requests that the target makes up, by completing the user's turn of its chat template (Magpie, Xu et al. 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gsd.tools.prompt_file import Chat

if TYPE_CHECKING:
    from vllm import LLM

# Maximum tokens and minimum characters of a request.
TOKENS, SHORTEST = 96, 9


def made_up(target: LLM, count: int) -> list[Chat]:
    """At most ``count`` distinct requests: fewer if the target repeats itself, none if it has no chat template."""
    from vllm import SamplingParams

    begin, end = user_turn(target.get_tokenizer())
    if not begin:
        return []
    # Texts that reach the token limit are kept too: they resemble long, truncated requests.
    params = SamplingParams(temperature=1.0, max_tokens=TOKENS, stop=[end], skip_special_tokens=False)
    outputs = target.generate([{"prompt_token_ids": begin}] * count, params, use_tqdm=False)
    texts = dict.fromkeys(output.outputs[0].text.strip() for output in outputs)
    return [[{"role": "user", "content": text}] for text in texts if len(text) >= SHORTEST]


def user_turn(tokenizer: Any) -> tuple[list[int], str]:
    """Tokens of a chat up to the user's text, and the text that ends the user's turn. Empty without a template."""
    mark = "\x02?\x03"
    if tokenizer.chat_template is None:
        return [], ""
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, _, after = text.partition(mark)
    end = after.strip().split("\n")[0]
    return (tokenizer(before, add_special_tokens=False)["input_ids"], end) if before and end else ([], "")
