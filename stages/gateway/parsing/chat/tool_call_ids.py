"""Ids of tool calls in a chat's history that leaves them out, as some clients do: null, absent or empty. Pure.

As in llama.cpp, the results that follow an assistant's message answer its calls in their order. This is only done where
it is certain: if none of these results has an id, or if one result and one call are left.
"""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from pipeline.client.protocol.conversation import MessageParam, ToolCallParam
from pipeline.stages.gateway.errors import ApiError, invalid


def with_ids(messages: Sequence[MessageParam]) -> Sequence[MessageParam]:
    """The messages, with an id for each call and each result. Raises ApiError if it is not certain which call a result
    answers."""
    if not any(map(_lacks_id, messages)):
        return messages
    found = list(messages)
    taken = {call.id for message in messages for call in message.tool_calls or ()}
    numbers = iter(range(10**9))
    index = 0
    while index < len(found):
        end = index + 1
        if calls := found[index].tool_calls:
            while end < len(found) and found[end].role == "tool":
                end += 1
            given = _Calls(index, calls, found[index + 1 : end])
            answers = given.answers()
            ids = [call.id or _new_id(numbers, taken) for call in calls]
            each = [replace(call, id=one) for call, one in zip(calls, ids, strict=True)]
            found[index] = replace(found[index], tool_calls=each)
            for result, call in answers.items():
                found[index + 1 + result] = replace(found[index + 1 + result], tool_call_id=ids[call])
        elif found[index].role == "tool" and not found[index].tool_call_id:
            raise _required(index, "the id of the tool call that it answers")
        index = end
    return found


def _lacks_id(message: MessageParam) -> bool:
    if message.role == "tool":
        return not message.tool_call_id
    return any(not call.id for call in message.tool_calls or ())


class _Calls:
    """The calls of the message at `index`, and the results that follow."""

    def __init__(self, index: int, calls: Sequence[ToolCallParam], results: Sequence[MessageParam]) -> None:
        self._index = index
        self._calls = calls
        self._results = results

    def answers(self) -> dict[int, int]:
        """The places of the results without an id, and of the calls that they answer. Raises ApiError."""
        calls, results = self._calls, self._results
        without = [index for index, result in enumerate(results) if not result.tool_call_id]
        given = {result.tool_call_id for result in results if result.tool_call_id}
        nameless = [index for index, call in enumerate(calls) if not call.id]
        if nameless and not given <= {call.id for call in calls}:
            param = f"messages[{self._index}].tool_calls[{nameless[0]}].id"
            message = f"'{param}' is required: a result has a 'tool_call_id' that no call of this message has"
            raise invalid(param, message)
        left = [index for index, call in enumerate(calls) if not call.id or call.id not in given]
        if without and given and (len(left), len(without)) != (1, 1):
            raise self._unclear(without[0], "other results of the same calls have one, so their order does not say it")
        if len(without) > len(left):
            raise self._unclear(without[len(left)], "there are more results than calls")
        return dict(zip(without, left, strict=False))

    def _unclear(self, result: int, why: str) -> ApiError:
        return _required(self._index + 1 + result, why)


def _required(index: int, why: str) -> ApiError:
    param = f"messages[{index}].tool_call_id"
    return invalid(param, f"'{param}' is required: {why}")


def _new_id(numbers: Iterator[int], taken: set[str | None]) -> str:
    """An id that no call has. Nine letters and digits, because templates of Mistral's models refuse other ids."""
    return next(one for number in numbers if (one := f"call{number:05}") not in taken)
