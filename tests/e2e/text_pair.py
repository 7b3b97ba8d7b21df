"""The tiny pair with a tokenizer of single characters, special tokens and words, for tests that need text."""

import json
import string
from pathlib import Path

from tiny_pair import VOCAB_SIZE, TinyPair, build_tiny_pair

SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
FIRST = [*SPECIAL, " ", "\n"]  # the first tokens, in this order
CHARACTERS = [*string.ascii_letters, *string.digits, *string.punctuation]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def build_text_pair(folder: Path) -> TinyPair:
    """Build the pair in ``folder``. The remaining tokens are words such as " w301"."""
    pair = build_tiny_pair(folder)
    assert pair.eos >= len(FIRST)
    words = [*FIRST, *CHARACTERS]
    words += [f" w{index}" for index in range(len(words) + 1, VOCAB_SIZE)]
    words.insert(pair.eos, "<eos>")
    for path in (pair.target, pair.draft):
        _write_tokenizer(path, words)
    return pair


def _write_tokenizer(folder: Path, words: list[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Byte-level tokenizers write spaces and line breaks as these characters.
    vocab = {word.replace(" ", "Ġ").replace("\n", "Ċ"): index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[]))
    # Splitting into words keeps the tokenizer's cache small: it holds a few hundred words instead of 10,000 prompts.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
