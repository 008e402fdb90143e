"""Chats with a server of a tiny Qwen3.5, in its own template: prompts are found behind snapshots of the recurrent state
where the next turn drops the reasoning, and behind a system message."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.compiled import link_kernels
from tests.e2e.recovery.test_recovery import post
from tests.e2e.server import Server
from tests.stages.execute.recurrent_models import VARIANTS, make
from tests.stages.ingest.templates.chats import TEMPLATES, by_transformers
from tests.stages.prepare.checkpoints import save_folder

SOURCE = (TEMPLATES / "qwen3.5.jinja").read_text()
NUM_CHATS = 16
SYSTEM = {"role": "system", "content": "Answer as a captain would who has seen all the seven seas. " * 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS["qwen3_5"]
    made = make(replace(variant, changes=variant.changes | {"max_position_embeddings": 4096}))
    # tokenizer.json as it is: Qwen3.5's class would read it with a pattern of its own.
    files = {"chat_template": SOURCE, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = save_folder(tmp_path_factory.mktemp("models") / "recurrent", made, tokenizer_config=files)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    cache = f"cache_dir={link_kernels(model.parent / 'cache')}"
    with Server(f"model={model}", cache, "execute.kv_cache_bytes=32MiB", "schedule.max_num_seqs=16") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def ids_of(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    text = by_transformers(SOURCE, messages, add_generation_prompt=True)
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def num_computed(server: Server, messages: list[dict[str, Any]], expected: int) -> int:
    """How many tokens of a chat's prompt, which has `expected`, are computed."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    usage = post(server, "/v1/chat/completions", **body)["usage"]
    assert usage["prompt_tokens"] == expected
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def test_chats_of_three_turns_compute_what_is_new_and_less_than_a_block(server: Server, tokenizer: Tokenizer) -> None:
    def chat(number: int) -> list[tuple[int, int]]:
        """What each turn but the first computes, and what is new in it."""
        messages, before, found = [{"role": "user", "content": f"Question {number}: where, " * 9}], [0], []
        for turn in range(3):
            ids = ids_of(tokenizer, messages)
            num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, before, strict=False)))
            computed = num_computed(server, messages, len(ids))
            if turn:
                found.append((computed, len(ids) - num_common))
            messages += [
                {"role": "assistant", "content": f"There {number}.", "reasoning_content": "Where could it be?"},
                {"role": "user", "content": "And then? " * (number % 4 + 20)},
            ]
            before = ids
        return found

    with ThreadPoolExecutor(NUM_CHATS) as pool:
        turns = [turn for found in pool.map(chat, range(NUM_CHATS)) for turn in found]
    assert len(turns) == 2 * NUM_CHATS and min(num_new for _, num_new in turns) > 64, "shorter ones make no snapshot"
    assert all(computed <= num_new + 16 for computed, num_new in turns), turns


def test_another_chat_is_found_behind_the_same_system_message(server: Server, tokenizer: Tokenizer) -> None:
    chats = [[SYSTEM, {"role": "user", "content": f"{word} is it? " * 12}] for word in ("Where", "Who")]
    first, second = (ids_of(tokenizer, messages) for messages in chats)
    num_computed(server, chats[0], len(first))
    num_new = len(second) - sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    assert num_computed(server, chats[1], len(second)) <= num_new + 2 * 16
