"""Where prompts are cut for snapshots of a recurrent state: where others are likely to part from them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from pipeline.runtime import messages as m
from pipeline.stages.ingest.prompts import chat_cuts
from pipeline.stages.ingest.prompts.chat_cuts import ChatCuts
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates
from pipeline.stages.ingest.templates.template import ChatTemplate
from pipeline.stages.schedule.scheduler_config import StateConfig
from tests.stages.ingest import models as tiny
from tests.stages.ingest.templates.chats import TEMPLATES
from tests.stages.schedule.bench import Bench, config
from tests.stages.schedule.kv_cache.runs import num_computed

SPECIALS = {
    "qwen3.5": ["<|im_start|>", "<|im_end|>"],
    "llama3.1": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>"],
    "granite4.0": ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
}
SYSTEM, HELLO = m.ChatMessage("system", "Be brief. " * 10), m.ChatMessage("user", "Hello")


class Chats:
    """A model's template, with a tokenizer that has an id for each byte and for each special token."""

    def __init__(self, name: str) -> None:
        self.tokenizer: Tokenizer = tiny.byte_tokenizer()
        self.tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS[name]])
        source = (TEMPLATES / f"{name}.jinja").read_text()
        templates = ChatTemplates({"default": ChatTemplate(source, {"bos_token": "<s>"})}, "none", 1.0)
        self.prompts = tiny.prompts(self.tokenizer, tiny.facts(max_model_len=10_000, vocab_size=300), templates)
        cuts = chat_cuts.of_template(templates, self.tokenizer)
        assert cuts is not None
        self.cuts: ChatCuts = cuts

    def ids(self, *messages: m.ChatMessage) -> list[int]:
        return self.prompts.encode(m.ChatPrompt(list(messages))).ids.tolist()

    def of(self, ids: list[int], messages: Sequence[m.ChatMessage] = ()) -> list[int]:
        return self.cuts.of(np.array(ids, np.int32), messages)

    def before(self, ids: list[int], position: int) -> str:
        return self.tokenizer.decode(ids[:position], skip_special_tokens=False)


def num_common(ids: list[int], others: list[int]) -> int:
    return next(i for i, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other)


@pytest.mark.parametrize("name", SPECIALS)
def test_the_first_cut_is_where_the_next_turn_parts_from_the_prompt(name: str) -> None:
    chats = Chats(name)
    prompt = chats.ids(SYSTEM, HELLO)
    following = chats.ids(SYSTEM, HELLO, m.ChatMessage("assistant", "Hi", reasoning="Greet."), HELLO)
    parting = num_common([*prompt, -1], following)
    assert chats.of(prompt)[0] == parting
    assert (parting < len(prompt)) == (name == "qwen3.5"), "its next turn drops <think>"


@pytest.mark.parametrize("name", ["qwen3.5", "llama3.1", "granite4.0"])
def test_others_are_behind_the_system_message_and_before_the_last_messages(name: str) -> None:
    chats = Chats(name)
    hi = m.ChatMessage("assistant", "Hi")
    ids = chats.ids(SYSTEM, *[HELLO, hi] * 4, HELLO)
    end, *others = chats.of(ids)
    assert [ids[position] for position in others] == [chats.tokenizer.token_to_id(SPECIALS[name][0])] * 3
    texts = [chats.tokenizer.decode(ids[:position], skip_special_tokens=False) for position in (end, *others)]
    counts = [(text.count("Be brief."), text.count("Hello"), text.count("Hi")) for text in texts]
    assert counts == [(10, 5, 4), (10, 0, 0), (10, 4, 4), (10, 4, 3)]


def marked(message: m.ChatMessage) -> m.ChatMessage:
    return msgspec.structs.replace(message, is_cache_mark=True)


def test_the_client_marks_messages_behind_which_others_go_on() -> None:
    chats = Chats("qwen3.5")
    hi = m.ChatMessage("assistant", "Hi")
    plain = [SYSTEM, *[HELLO, hi] * 6, HELLO]
    ids = chats.ids(*plain)
    messages = [marked(message) if i in (1, 2, 4, 6, 7) else message for i, message in enumerate(plain)]
    more = [position for position in chats.of(ids, messages) if position not in chats.of(ids)]
    texts = [chats.before(ids, position) for position in more]
    assert [text.count("Hello") + text.count("Hi") for text in texts] == [2, 4, 6, 7], "the last four"
    assert all(ids[position] == chats.tokenizer.token_to_id("<|im_start|>") for position in more)
    assert chats.of(ids[100:], messages) == chats.of(ids[100:]), "which messages are left of a cut chat is not known"


def test_marks_behind_results_of_tools_that_a_template_makes_one_message() -> None:
    chats = Chats("qwen3.5")
    calls = [m.ToolCall(str(i), "look", "{}") for i in range(2)]
    asks = m.ChatMessage("assistant", None, tool_calls=calls)
    found = [m.ChatMessage("tool", f"Found {i}", tool_call_id=str(i)) for i in range(2)]
    messages = [HELLO, asks, found[0], marked(found[1]), *[m.ChatMessage("assistant", "Hi"), HELLO] * 3]
    ids = chats.ids(*messages)
    (position,) = set(chats.of(ids, messages)) - set(chats.of(ids))
    text = chats.before(ids, position)
    assert "Found 1" in text and "Hi" not in text


def test_prompts_that_are_no_chats_have_their_end_only() -> None:
    chats = Chats("qwen3.5")
    assert chats.of([1, 2, 3]) == [3]
    ids = chats.ids(HELLO)
    assert chats.of(ids[:-10]) == [len(ids) - 10, chats.of(ids)[0] - len("<assistant\n")], (
        "a part of the reply's opening"
    )


def test_a_template_without_special_tokens_has_none() -> None:
    templates = ChatTemplates({"default": ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")}, "", 1.0)
    assert chat_cuts.of_template(templates, tiny.byte_tokenizer()) is None
    assert chat_cuts.of_template(ChatTemplates({}, "no template", 1.0), tiny.byte_tokenizer()) is None


def test_chats_that_drop_their_reasoning_compute_what_is_new_and_less_than_a_block() -> None:
    """16 chats of three turns at once, behind one system message."""
    chats = Chats("qwen3.5")
    states = StateConfig(num_slots=64)
    bench = Bench(config(num_blocks=3000, max_model_len=4096, max_num_seqs=16, states=states), depth=1)
    histories = [[SYSTEM, m.ChatMessage("user", f"Question {i:2d} " * (5 + i))] for i in range(16)]
    before: list[list[int]] = [[] for _ in range(16)]
    for turn in range(3):
        num_new = 0
        for i, history in enumerate(histories):
            ids = chats.ids(*history)
            num_new += len(ids) - (num_common(ids, before[i]) if turn else 0)
            bench.admit(ids, max_tokens=40, cut_positions=chats.of(ids))
            before[i] = ids
            history += [
                m.ChatMessage("assistant", f"Answer {i} " * 9, reasoning="Hm."),
                m.ChatMessage("user", "More?" * i),
            ]
        num = num_computed(bench) - 16 * 39
        assert num <= num_new + 16 * 16, f"turn {turn} computed {num - num_new} positions again"
    assert bench.scheduler.kv_cache_manager.states.num_hits >= 32


def test_another_chat_with_the_system_message_of_one_finds_it() -> None:
    chats = Chats("qwen3.5")
    bench = Bench(config(num_blocks=400, max_model_len=1024, states=StateConfig(num_slots=20)), depth=1)
    first, second = (chats.ids(SYSTEM, m.ChatMessage("user", text * 40)) for text in ("What?", "Where?"))
    for ids in (first, second):
        bench.admit(ids, max_tokens=1, cut_positions=chats.of(ids))
        num = num_computed(bench)
    assert num < len(second) - num_common(first, second) + 32
