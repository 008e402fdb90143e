"""What the gateway does when a stage's process has been replaced, or is gone: it submits the stage's requests again.

    ingest died       requests that schedule may not have: `Submit` with the next attempt
    schedule died     all requests: the same, with the output that has arrived
    detokenize died   nothing: schedule tells the successor everything again, and results.py skips what has arrived

Each attempt is submitted only once, so one scheduler at most runs it. Ids of two schedulers could contradict each other
on a GPU.

Aborts are repeated too. A request that was alone in work at two deaths of a stage probably causes them: it fails. If
threads of ingest had several in work, its successor works on each of them alone (stages/ingest/submit_queue.py).

Schedule works on many requests at once. When it has crashed, all of those are suspects. Its successor runs suspects in
groups, which get smaller with each death (stages/schedule/quarantine.py), and leaves the names of the group if it dies
too. A suspect with some new output ids is cleared.
"""

from http import HTTPStatus

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.request import PromptRequest, next_attempt
from pipeline.stages.gateway.request_table import RequestTable, log_fields

MAX_STRIKES = 2
"""Deaths of a stage while it worked on a request and on no other, before the request fails."""
MAX_SCHEDULE_DEATHS = 3
"""Deaths of schedule while it ran a request, without progress in between, before the request fails, if it ran alone at
the last one. Beside others it never does: one of them may be the reason each time."""


class Recovery:
    """Handles `PeerRestarted`."""

    def __init__(
        self,
        stage: "Stage[m.GatewayInbox]",
        requests: RequestTable,
        aborter: RequestAborter,
        resetter: PrefixCacheResetter,
    ) -> None:
        self._stage = stage
        self._requests = requests
        self._aborter = aborter
        self._resetter = resetter

    def peer_restarted(self, message: m.PeerRestarted) -> None:
        stage, _, replica = message.peer.name.partition(".")
        if message.suspect is not None and message.has_crashed:
            self._strike(message.suspect, stage)
        if stage == "schedule":
            self._accuse(message.suspects)
        elif stage == "ingest":
            self._isolate(message.suspects)
        match stage:
            case "ingest":
                self._requests.drop_unsent(message.peer.name)
                for one in self._requests.open_prompts():
                    if one.ingest == int(replica) and not (one.is_with_schedule or one.is_preempted):
                        self._submit_next(one)
            case "schedule":
                self._requests.drop_unsent(message.peer.name)
                for one in self._requests.open_prompts():
                    if one.generates and not one.is_preempted:
                        self._submit_next(one)
                self._requests.repeat_closed()
                self._resetter.repeat()
            case "detokenize":
                self._resetter.repeat()
            case "gateway":
                self._aborter.lost(int(replica), is_removed=message.is_removed)
        self._stage.reconnected(message)

    def _submit_next(self, prompt_request: PromptRequest) -> None:
        if prompt_request.generates:
            prompt_request.submit = next_attempt(prompt_request)
            prompt_request.is_confirmed = False
        self._requests.submit_again(prompt_request)

    def _strike(self, request_id: int, stage: str) -> None:
        """A process of this stage has crashed while it worked on a request, and on no other."""
        prompt_request = self._requests.get(request_id)
        if prompt_request is None or prompt_request.is_closed:
            return
        prompt_request.num_strikes += 1
        if stage == "ingest":
            self._isolate([request_id])
        if prompt_request.num_strikes >= MAX_STRIKES:
            self._fail(prompt_request, stage, prompt_request.num_strikes)

    def _isolate(self, suspects: list[int]) -> None:
        """Ingest has crashed while it worked on these requests, in threads: it works on each alone from now on."""
        for request_id in suspects:
            if (prompt_request := self._requests.get(request_id)) is not None and not prompt_request.is_closed:
                prompt_request.submit = msgspec.structs.replace(prompt_request.submit, is_suspect=True)

    def _accuse(self, suspects: list[int]) -> None:
        """Schedule has crashed while it ran these requests, some of which may be of other gateways."""
        is_alone = len(suspects) == 1
        for request_id in suspects:
            prompt_request = self._requests.get(request_id)
            if prompt_request is None or prompt_request.is_closed:
                continue
            prompt_request.suspect()
            if is_alone and prompt_request.num_schedule_deaths >= MAX_SCHEDULE_DEATHS:
                self._fail(prompt_request, "schedule", prompt_request.num_schedule_deaths)

    def _fail(self, prompt_request: PromptRequest, stage: str, num_deaths: int) -> None:
        message = f"{stage} died {num_deaths} times while it worked on this request"
        self._stage.log.error("failed", extra=log_fields(prompt_request, why=message))
        prompt_request.request.fail(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="stage_died"))
        self._requests.give_up(prompt_request)
