"""Finds open requests by the ids that abort them, each within the scope of its API key. Pure."""

from collections.abc import Sequence

from pipeline.stages.gateway.open_requests.request import Request


class AbortIds:
    """Of requests for output whose responses are not over. Clients may give several requests one id."""

    def __init__(self) -> None:
        self._requests: dict[tuple[str, str], list[Request]] = {}
        """By scope and id."""
        self.num_requests = 0

    def add(self, request: Request) -> None:
        if not request.parsed.is_prompt_only:
            self.num_requests += 1
            for abort_id in request.abort_ids:
                self._requests.setdefault((request.parsed.scope, abort_id), []).append(request)

    def remove(self, request: Request) -> None:
        if not request.parsed.is_prompt_only:
            self.num_requests -= 1
            for abort_id in request.abort_ids:
                key = request.parsed.scope, abort_id
                self._requests[key].remove(request)
                if not self._requests[key]:
                    del self._requests[key]

    def find(self, abort_id: str, scope: str) -> Sequence[Request]:
        return self._requests.get((scope, abort_id), ())
