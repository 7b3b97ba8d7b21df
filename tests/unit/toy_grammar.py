"""A toy grammar, and the parts of vLLM's StructuredOutputManager that the tests use."""

from types import SimpleNamespace

import torch


class ToyGrammar:
    """A grammar that allows 2t + 1, 2t + 2, ... (``fan`` tokens, modulo ``modulus``) after t; ``end`` ends the text."""

    def __init__(self, modulus=13, fan=2, end=12):
        self.modulus, self.fan, self.end = modulus, fan, end
        self.text = [0]

    def next_tokens(self):
        return {(2 * self.text[-1] + i) % self.modulus for i in range(1, self.fan + 1)}

    def is_terminated(self):
        return self.text[-1] == self.end

    def accept_tokens(self, request_id, tokens):
        for token in tokens:
            assert not self.is_terminated() and token in self.next_tokens()
            self.text.append(token)
        return True

    def rollback(self, count):
        del self.text[len(self.text) - count :]

    def validate_tokens(self, tokens):
        count = len(self.text)
        for token in tokens:
            if self.is_terminated() or token not in self.next_tokens():
                break
            self.text.append(token)
        valid = self.text[count:]
        del self.text[count:]
        return valid

    def fill_bitmask(self, bitmask, row):
        bitmask[row] = sum(1 << token for token in self.next_tokens())


class Manager:
    """The used parts of vLLM's StructuredOutputManager; with ``reasoning_end``, the grammar starts after that token."""

    def __init__(self, reasoning_end=None):
        self.reasoning_end = reasoning_end
        self._grammar_bitmask = torch.zeros((64, 1), dtype=torch.int32)

    def _get_constraint_bounds(self, request, tokens):
        if self.reasoning_end is None:
            return 0, 0
        start = tokens.index(self.reasoning_end) + 1 if self.reasoning_end in tokens else len(tokens) + 1
        return start, start

    def validate_tokens(self, request, tokens):
        start, _ = self._get_constraint_bounds(request, tokens)
        if start >= len(tokens):
            return tokens
        return tokens[:start] + request.structured_output_request.grammar.validate_tokens(tokens[start:])

    def _fill_bitmasks(self, batch):
        for grammar, row, apply in batch:
            if apply and not grammar.is_terminated():
                grammar.fill_bitmask(self._grammar_bitmask, row)
            else:
                self._grammar_bitmask[row] = -1


def toy_request(*options):
    return SimpleNamespace(request_id="toy", structured_output_request=SimpleNamespace(grammar=ToyGrammar(*options)))
