"""Where other prompts are likely to part from a chat: a model with recurrent layers keeps snapshots of its state there.

    <|im_start|>system … <|im_start|>user … … <|im_start|>user … <|im_start|>assistant\\n <think>\\n
                         │ other chats        │ the last message │                     │ the next turn, which drops
                         │ with this system   │ is another one   │                     │ the reasoning
                         message

These are found among the ids, by the special tokens with which the template begins a message: prompts that a client
gives as ids have them too. Of the messages between, none is kept but those that the client marks: each snapshot has a
size of some thousand tokens' KV.
"""

from collections.abc import Collection, Sequence

import numpy as np
from tokenizers import Tokenizer

from pipeline.runtime.messages import ChatMessage, ChatPrompt
from pipeline.stages.ingest.prompts.ids import Ids
from pipeline.stages.ingest.templates.budget import OutOfTime
from pipeline.stages.ingest.templates.chat_templates import PROBE_CHARS, ChatTemplates
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import TemplateFailure, TextTooLong

NUM_LAST = 2
"""Of the last messages, so many starts are cuts."""
MAX_MARKS = 4
"""Of the client's marks, so many of the last are cuts; Anthropic's API takes four."""
FIRST, ANSWER, SECOND = "First words", "Answered words", "Second words"
PROBE = [ChatMessage("user", FIRST), ChatMessage("assistant", ANSWER), ChatMessage("user", SECOND)]


class ChatCuts:
    def __init__(self, starts: Collection[int], reply: list[int]) -> None:
        """`starts` are ids that begin a message; `reply` are those before the text of an assistant's message."""
        self._starts = np.array(sorted(starts), np.int32)
        self._reply = reply

    def of(self, ids: Ids, messages: Sequence[ChatMessage] = ()) -> list[int]:
        """Positions of a prompt behind which others may go on in another way: first the next turn, then the others.
        `messages` are those of a chat."""
        starts = np.flatnonzero(np.isin(ids, self._starts)).tolist()
        end = len(ids)
        if starts and ids[starts[-1] : (behind := starts[-1] + len(self._reply))].tolist() == self._reply:
            end = behind
            starts.pop()
        wanted = [end, *starts[1:2], *_behind_marks(starts, messages), *starts[-NUM_LAST:][::-1]]
        return [position for position in dict.fromkeys(wanted) if position]


def _behind_marks(starts: list[int], messages: Sequence[ChatMessage]) -> list[int]:
    """The starts of the messages behind the client's marks. None if the template makes of the messages others than one
    each, or than one of the results of tools that follow each other."""
    if not any(message.is_cache_mark for message in messages):
        return []
    begins = [0, *(i for i, message in enumerate(messages) if i and _begins(message, messages[i - 1]))]
    for own in (range(len(messages)), begins):
        num_others = len(starts) - len(own)  # a system message that the template adds
        if 0 <= num_others <= 1:
            at = {message: starts[num_others + number] for number, message in enumerate(own)}
            marks = [i + 1 for i, message in enumerate(messages) if message.is_cache_mark]
            return [at[i] for i in marks[-MAX_MARKS:] if i in at]
    return []


def _begins(message: ChatMessage, before: ChatMessage) -> bool:
    return not message.role == before.role == "tool"


def of_template(templates: ChatTemplates, tokenizer: Tokenizer) -> ChatCuts | None:
    """The cuts of chats in a model's template, found out by a try. None if it begins messages without special tokens,
    or takes no chat of three messages."""
    try:
        chat, asked = (
            templates.text(
                ChatPrompt(PROBE, add_generation_prompt=asks), max_chars=PROBE_CHARS, now_s=0.0, is_short=False
            )
            for asks in (False, True)
        )
    except (BadChat, TemplateFailure, TextTooLong, OutOfTime):
        return None
    if not all(words in chat for words in (FIRST, ANSWER, SECOND)):
        return None
    end = chat[chat.rindex(SECOND) + len(SECOND) :]
    openings = [
        asked.removeprefix(chat),
        _between(chat, FIRST, ANSWER).removeprefix(end),
        _between(chat, ANSWER, SECOND).removeprefix(end),
    ]
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    asks, replies, _ = encoded = [_ids(tokenizer, text) for text in openings]
    starts = {ids[0] for ids in encoded if ids} & special
    num_common = next((i for i, pair in enumerate(zip(asks, replies, strict=False)) if pair[0] != pair[1]), None)
    return ChatCuts(starts, replies[:num_common] if num_common else replies) if starts else None


def _between(text: str, before: str, after: str) -> str:
    return text[text.index(before) + len(before) : text.rindex(after)]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    return list(encoding.ids)
