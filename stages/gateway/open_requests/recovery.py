"""What the gateway does when a stage's process has been replaced, or is gone: it submits the stage's requests again.

    ingest died       requests that schedule may not have: `Submit` with the next attempt
    schedule died     all requests: the same, with the output that has arrived
    detokenize died   nothing: schedule tells the successor everything again, and results.py skips what has arrived

Each attempt is submitted only once, so one scheduler at most runs it. Ids of two schedulers could contradict each other
on a GPU.

Aborts are repeated too. Requests that kill a stage fail when the supervisor says so (`FailRequests`).
"""

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, log_fields, next_attempt
from pipeline.stages.gateway.open_requests.request_errors import sequence_error
from pipeline.stages.gateway.open_requests.table import RequestTable


class Recovery:
    """Handles `PeerRestarted` and `FailRequests`."""

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

    def handle(self, message: m.PeerRestarted | m.FailRequests) -> None:
        if isinstance(message, m.FailRequests):
            self._fail(message)
        else:
            self._peer_restarted(message)

    def _peer_restarted(self, message: m.PeerRestarted) -> None:
        stage, _, replica = message.peer.name.partition(".")
        match stage:
            case "ingest":
                self._requests.sender.drop_unsent(message.peer.name)
                for one in self._requests.open_prompts():
                    if one.ingest == int(replica) and not (one.is_with_schedule or one.is_preempted):
                        self._submit_next(one)
            case "schedule":
                self._requests.sender.drop_unsent(message.peer.name)
                for one in self._requests.open_prompts():
                    if one.generates and not one.is_preempted:
                        self._submit_next(one)
                self._requests.sender.repeat_closed()
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

    def _fail(self, message: m.FailRequests) -> None:
        """Fail requests that kill a stage. Some may be of other gateways."""
        for request_id, error in message.errors.items():
            prompt_request = self._requests.get(request_id)
            if prompt_request is not None and not prompt_request.is_closed:
                self._stage.log.error("failed", extra=log_fields(prompt_request, why=error))
                prompt_request.request.fail(sequence_error(prompt_request, error))
                self._close(prompt_request)

    def _close(self, prompt_request: PromptRequest) -> None:
        """It is not submitted again."""
        if prompt_request.generates:
            self._requests.sender.abort(prompt_request)
            self._requests.sender.close(prompt_request.id, prompt_request.submit.attempt)
        self._requests.close(prompt_request)
