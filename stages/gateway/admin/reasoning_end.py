"""Ends the reasoning of requests that run: they go on with the end of the reasoning, and then their answer.

A request is submitted again, with the output that has arrived, as after the death of schedule, and with a budget that
is used (`ReasoningBudget.ends_now`). So nothing that its client has changes, and no other stage knows of it. What
schedule has computed beyond that output is dropped; its blocks are in the prefix cache.
"""

import msgspec

from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, next_attempt
from pipeline.stages.gateway.open_requests.table import RequestTable


def end_reasoning(table: RequestTable, abort_ids: list[str], scope: str) -> list[int]:
    """End the reasoning of the requests with these ids in a scope. Returns the positions of the ids of which a request
    was found that runs and can be controlled. Idempotent."""
    found = []
    for index, abort_id in enumerate(abort_ids):
        runs = [
            one
            for request in table.abort_ids.find(abort_id, scope)
            for one in request.prompt_requests
            if request.parsed.options.reasoning_control and _runs(one)
        ]
        if runs:
            found.append(index)
        for one in runs:
            _end(table, one)
    return found


def _runs(one: PromptRequest) -> bool:
    return one.generates and not (one.is_finished or one.is_aborted or one.is_released)


def _end(table: RequestTable, one: PromptRequest) -> None:
    options = one.submit.options
    if one.prompt_ids is None:
        if options.thinking_token_budget == 0:
            return
        options = msgspec.structs.replace(options, thinking_token_budget=0)
    else:
        if (budget := options.reasoning_budget) is None or budget.ends_now:  # no reasoning, or it has been ended
            return
        options = msgspec.structs.replace(options, reasoning_budget=msgspec.structs.replace(budget, ends_now=True))
    if one.is_preempted:  # it is submitted again later
        one.submit = msgspec.structs.replace(one.submit, options=options)
        return
    table.sender.withdraw(one)
    one.submit = msgspec.structs.replace(next_attempt(one), options=options)
    table.submit_again(one)
