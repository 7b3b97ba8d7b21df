"""The parts of ``vllm-gsd distill`` that need no engine."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_gsd.tools.distill import generate, prompts, run, student
from vllm_gsd.tools.distill.generate import TOP
from vllm_gsd.tools.distill.train import Distillation, collate, count_parameters, load_answers
from vllm_gsd.tools.distill.validate import agreement
from vllm_gsd.tools.prompt_file import PromptsError

CONFIG = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip


class TestPrompts:
    def test_the_first_round_is_varied_and_the_same_for_a_seed(self):
        chats = prompts.first_round(400, 3)
        assert chats == prompts.first_round(400, 3) != prompts.first_round(400, 4)
        assert len({json.dumps(chat) for chat in chats}) == 400
        # A larger count begins with the same requests, so a longer run can continue a shorter one.
        assert prompts.first_round(500, 3)[:400] == chats
        assert not any("{" in chat[0]["content"] for chat in chats)

    def test_the_second_round_is_about_answers(self):
        answers = [([{"role": "user", "content": "x"}], f"Sentence {i}. " * 40) for i in range(20)]
        chats = prompts.second_round(200, 5, answers)
        assert len(chats) == 200
        assert sum("Sentence" in json.dumps(chat) for chat in chats) > 190
        assert {len(chat) for chat in chats} == {1, 3}  # some continue the chat

    def test_without_answers_worth_quoting(self):
        assert len(prompts.second_round(10, 0, [([], "short")])) == 10

    def test_from_file(self, tmp_path):
        file = tmp_path / "prompts.jsonl"
        chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        rows = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"messages": chat}]
        file.write_text("\n\n".join(map(json.dumps, rows)))
        user = [[{"role": "user", "content": text}] for text in "ab"]
        assert prompts.from_file(file) == [*user, chat]

    @pytest.mark.parametrize(
        "text",
        ["", "{", "[1]", '{"prompt": 3}', '{"turns": []}', '{"messages": [{"role": "user"}]}', '{"messages": []}'],
    )
    def test_bad_files(self, tmp_path, text):
        file = tmp_path / "prompts.jsonl"
        file.write_text(text)
        with pytest.raises(PromptsError, match=r"prompts\.jsonl"):
            prompts.from_file(file)

    def test_missing_file(self, tmp_path):
        with pytest.raises(PromptsError, match="cannot be read"):
            prompts.from_file(tmp_path / "none")


class TestShape:
    @pytest.mark.parametrize("params", [500_000, 1_500_000, 10**9])
    def test_the_widest_that_fits(self, params):
        shape = student.choose_shape(CONFIG, params, None, 500)

        def size(width):
            other = student.Shape(width, student.DEPTH, 500)
            return student.DEPTH * other.layer_parameters() + 1000 * width

        assert size(shape.width) <= params
        assert shape.width == CONFIG["hidden_size"] or size(shape.width + student.WIDTH_STEP) > params

    def test_by_cost(self):
        shape = student.choose_shape(CONFIG, None, 0.3, 500)
        read = student.DEPTH * shape.layer_parameters() + 500 * shape.width
        assert 0.1 < read / student.target_parameters(CONFIG) <= 0.3

    def test_too_small(self):
        with pytest.raises(student.StudentError, match="1,000 parameters"):
            student.choose_shape(CONFIG, 1000, None, 500)

    @pytest.mark.parametrize("layers", [(0, 6), (-1,), ()])
    def test_layers_that_are_not_there(self, layers):
        with pytest.raises(student.StudentError, match="layers 0 to 5"):
            student.layers_shape(CONFIG, layers, 500)

    def test_no_llama(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        with pytest.raises(student.StudentError, match="'gpt2'"):
            student.target_config(tmp_path)

    def test_ranking(self):
        assert student.rank_tokens(np.array([0, 5, 2, 5, 0]), [4]).tolist() == [4, 1, 3, 2, 0]

    def test_projection_keeps_what_is_alike(self):
        base = torch.randn(100, 4) @ torch.randn(4, 64)
        small = student.project(base, 4)
        torch.testing.assert_close(small @ small.T, base @ base.T, rtol=1e-3, atol=1e-2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}))
    model.save_pretrained(folder)
    return folder


def answers(count, vocab_size):
    random = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        length, prompt_len = int(random.integers(4, 12)), 3
        known = length - prompt_len
        top = np.log(np.sort(random.dirichlet(np.ones(TOP + 1), known), axis=1)[:, ::-1][:, :TOP])
        rows.append({
            "input_ids": random.integers(0, vocab_size, length), "prompt_len": np.int64(prompt_len),
            "top_ids": np.concatenate([random.choice(vocab_size, TOP, replace=False) for _ in range(known)]),
            "top_logprobs": top.ravel(),
        })  # fmt: skip
    return rows


class Rows(list):
    """A list with the interface of a dataset."""


def test_students_load_and_count(target, tmp_path):
    config, ranking = student.target_config(target), np.arange(1000)[::-1]
    narrow = student.Shape(128, 2, 300)
    student.make_student(target, tmp_path / "narrow", narrow, ranking, 0)
    own = student.layers_shape(config, (0, 5), 300)
    student.make_student(target, tmp_path / "own", own, ranking, 0)
    whole = LlamaForCausalLM.from_pretrained(target)
    taken = LlamaForCausalLM.from_pretrained(tmp_path / "own")
    torch.testing.assert_close(taken.model.layers[1].mlp.up_proj.weight, whole.model.layers[5].mlp.up_proj.weight)
    torch.testing.assert_close(taken.model.embed_tokens.weight, whole.model.embed_tokens.weight)
    total, read = count_parameters(tmp_path / "narrow", 300)
    norms = 5 * 128
    assert total == 2 * narrow.layer_parameters() + 1000 * 128 + norms
    assert read == total - norms + 4 * 128 - 700 * 128


def test_loss_is_the_cross_entropy_over_the_trimmed_vocabulary(target):
    whole = LlamaForCausalLM.from_pretrained(target)
    token_ids = torch.arange(0, 1000, 3)
    model = Distillation(whole, token_ids, freeze_embedding=True)
    rows = answers(5, 1000)
    expected, positions = 0.0, 0
    for row in rows:
        logits = whole(torch.from_numpy(row["input_ids"])[None]).logits[0].detach()
        for place in range(len(row["input_ids"]) - 3):
            q = logits[2 + place][token_ids].log_softmax(0)
            for token, logprob in zip(
                row["top_ids"][TOP * place :][:TOP], row["top_logprobs"][TOP * place :][:TOP], strict=True
            ):
                if token % 3 == 0:
                    expected -= np.exp(logprob) * float(q[token // 3])
            positions += 1
    loss = model(**collate(rows))["loss"]
    assert float(loss.detach()) == pytest.approx(expected / positions, rel=1e-4)
    trained = set(model.state_dict())
    assert not any("embed_tokens" in name or "lm_head" in name for name in trained)
    assert any("up_proj" in name for name in trained)


def test_agreement_counts_the_targets_best_token(target):
    whole = LlamaForCausalLM.from_pretrained(target)
    model = Distillation(whole, torch.arange(1000), freeze_embedding=True)
    rows = answers(6, 1000)
    for index, row in enumerate(rows):
        logits = whole(torch.from_numpy(row["input_ids"])[None]).logits[0].detach()[2:-1]
        rank = [0, 3, 4][index % 3]  # of the token that the fake target prefers
        row["top_ids"].reshape(-1, TOP)[:, 0] = logits.argsort(descending=True)[:, rank]
    found = agreement(model, Rows(rows), collate)
    counts = np.array([len(row["input_ids"]) - 3 for row in rows], float)
    share = [counts[0::3].sum() / counts.sum(), (counts[0::3].sum() + counts[1::3].sum()) / counts.sum()]
    assert found["top_1"] == pytest.approx(share[0], abs=0.1)
    assert found["top_4"] == pytest.approx(share[1], abs=0.1)


def test_as_many_answers_as_there_is_time_for(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])
    left = generate.shard_path(tmp_path / "answers", "first", 0)
    left.parent.mkdir()
    left.write_text("of a run that was killed")

    def takes(seconds, chats=()):
        assert not left.exists() and len(chats) in (0, generate.SHARD)
        now[0] += seconds

    options = run.Options(target="t", minutes=20)
    for _ in range(2):  # decided once
        planned = run._planned_answers(options, tmp_path, lambda: takes(100), lambda chats: takes(40, chats))
        # 40% of 1,200 seconds, where later shards take 1.5 times as long as the first.
        assert planned == generate.SHARD * (1 + (480 - 140) // 60)
    assert now == [140.0]
    assert run._planned_answers(run.Options(target="t", answers=7), tmp_path, None, None) == 7


def test_an_empty_answer_keeps_its_place_and_is_not_learned_from(tmp_path, monkeypatch):
    """The second round asks about answers, so each must stay with its request."""

    def output(length):
        flat = {"token_ids": [5] * TOP * length, "logprobs": [-1.0] * TOP * length}
        flat |= {"start_indices": range(0, TOP * length, TOP), "end_indices": range(TOP, TOP * length + 1, TOP)}
        completion = {"token_ids": [5] * length, "text": f"{length} tokens", "logprobs": SimpleNamespace(**flat)}
        return SimpleNamespace(prompt_token_ids=[1, 2], outputs=[SimpleNamespace(**completion)])

    monkeypatch.setattr(generate, "_generate", lambda llm, chats, *rest: [output(length) for length in (4, 1, 3)])
    texts = generate.answer(AskingTarget("template"), [[]] * 3, tmp_path, "first", max_tokens=9, seed=0)
    assert texts == ["4 tokens", "1 tokens", "3 tokens"]
    data = load_answers([generate.shard_path(tmp_path, "first", 0)], 640)
    assert [int(row["first"]) for row in data] == [0, 6 + 3]


@pytest.mark.parametrize(
    ("shards", "own", "second"), [(0.5, 0, 0), (1, 0, 0), (2, 1, 0), (3, 2, 0), (4, 2, 1), (10, 5, 3), (30, 15, 9)]
)
def test_rounds_are_whole_shards_and_the_first_one_is_there(shards, own, second):
    size = generate.SHARD
    assert run.later_rounds(int(shards * size)) == (own * size, second * size)


class AskingTarget:
    """A fake engine of the target that repeats every text, and finishes two of three."""

    def __init__(self, template: str | None):
        self.turns: list[tuple[list, object]] = []
        self.chat_template = template

    def get_tokenizer(self):
        return self

    def apply_chat_template(self, chat, tokenize):
        return f"<s>system\n<u>{chat[0]['content']}</u>\n<a>"

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [len(text)]}

    def generate(self, prompts, params, use_tqdm):
        self.turns.append((prompts, params))
        first = 300 * len(self.turns)
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        text=f" Question {first + i // 2}\n", finish_reason="length" if i % 3 == 2 else "stop"
                    )
                ]
            )
            for i in range(len(prompts))
        ]


class TestOwnRequests:
    def test_the_target_goes_on_where_a_user_begins(self, tmp_path):
        target = AskingTarget("template")
        chats = generate.own_requests(target, 200, tmp_path / "own.json", 0)
        assert len(chats) == len({json.dumps(chat) for chat in chats}) == 200
        assert chats[0] == [{"role": "user", "content": "Question 300"}]
        prompts, params = target.turns[0]
        assert prompts[0] == {"prompt_token_ids": [len("<s>system\n<u>")]}
        assert params.stop == ["</u>"] and params.temperature == 1.0
        assert len(target.turns) == 2  # half of each shard repeats earlier texts
        assert generate.own_requests(None, 200, tmp_path / "own.json", 0) == chats  # kept

    def test_without_a_chat_template_there_are_none(self, tmp_path):
        target = AskingTarget(None)
        assert generate.own_requests(target, 10, tmp_path / "own.json", 0) == []
        assert not target.turns

    def test_a_target_that_says_nothing_new_is_not_asked_for_ever(self, tmp_path):
        target = AskingTarget("template")
        target.generate = lambda prompts, params, use_tqdm: target.turns.append(1) or []
        assert generate.own_requests(target, 10, tmp_path / "own.json", 0) == []
        assert len(target.turns) == 1
