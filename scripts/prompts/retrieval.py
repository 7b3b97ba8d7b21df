"""Write prompts for long-context retrieval: a chapter of the Python reference, and a paragraph to find and quote.

The texts come with every Python (``pydoc_data.topics``). Run ``python scripts/prompts/retrieval.py > retrieval.jsonl``.
"""

import json
import random
import sys
from collections import Counter
from pydoc_data.topics import topics

LENGTHS = range(4_000, 14_001)  # characters of a chapter, about four per token
COUNT = 24
ASK = (
    "{text}\n\nFind the paragraph of the text above that mentions `{word}`. "
    "Quote the whole paragraph word for word, and then say in one sentence what it means."
)


def prompts(seed: int = 0) -> list[dict[str, str]]:
    """Make ``COUNT`` prompts, each with a word that occurs in only one paragraph of its chapter."""
    rng = random.Random(seed)
    chapters = [text for _, text in sorted(topics.items()) if len(text) in LENGTHS]
    result = []
    for text in rng.sample(chapters, len(chapters)):
        paragraphs = [paragraph for paragraph in text.split("\n\n") if 200 < len(paragraph) < 700]
        counts = Counter(word for paragraph in text.split("\n\n") for word in {*paragraph.split()})
        words = [word for paragraph in paragraphs for word in paragraph.split() if word.isalpha() and len(word) > 6]
        rare = [word for word in words if counts[word] == 1]
        if rare:
            result.append({"category": "retrieval", "prompt": ASK.format(text=text, word=rng.choice(rare))})
    return result[:COUNT]


if __name__ == "__main__":
    for prompt in prompts():
        sys.stdout.write(json.dumps(prompt) + "\n")
