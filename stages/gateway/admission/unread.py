"""Makes room for new requests, and for those whose output grows: output that clients take too slowly is given up.

    admission check ──refused──► would it pass without what slow clients keep? ──yes──► these lose it ──► admitted
    preemption.py ──before a request has to wait──────────────────────────────────┘

What waits for a client is a complete reply, the backlog of a stream or the events of a background response. Which
clients lose it is the rule of pipeline/http_server/sockets/deliveries.py. An API key that has no more than its share of
the bytes, the same for all that have requests open, need not wait until the clients of one that has more are slow.
"""

import contextlib
import copy
import logging
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from aiohttp import web

from pipeline.config.settings import Settings
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.sockets.deliveries import Client, Deliveries, Delivery
from pipeline.http_server.sockets.slow_clients import UnreadReplies, http_delivery, max_unread_bytes
from pipeline.runtime import topology
from pipeline.runtime.security.api_keys import NO_SCOPE
from pipeline.stages.gateway.admission.admission import Admission
from pipeline.stages.gateway.admission.media_admission import open_media_bytes
from pipeline.stages.gateway.admission.open_bytes import images_bytes
from pipeline.stages.gateway.admission.shares import check_media_share, check_share
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest

if TYPE_CHECKING:
    from pipeline.stages.gateway.apis.responses.event_log import EventLog
    from pipeline.stages.gateway.open_requests.table import RequestTable


def unread_replies(settings: Settings, log: logging.Logger) -> UnreadReplies:
    """Replies besides those of open requests, of one of the server's gateways."""
    return UnreadReplies(
        lambda: max_unread_bytes(topology.max_open_bytes_of_one(settings)),
        settings.gateway.slow_client_timeout_s,
        Deliveries(log),
    )


class KeptOutput(NamedTuple):
    """What admission counts for a request, and would not without it."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    num_base_bytes: int = 0


class UnreadOutput:
    """Output of a table's requests that waits for clients."""

    def __init__(self, table: "RequestTable", deliveries: Deliveries) -> None:
        self._table = table
        self._deliveries = deliveries
        self._kept: dict[Delivery, Callable[[], KeptOutput]] = {}

    # ------------------------------------------------------------------------------------------------------ deliveries

    @contextlib.contextmanager
    def waiting(self, http_request: web.BaseRequest, request: Request) -> Iterator[None]:
        """The output of a request waits for its client until the end of the block."""
        with self._counted(
            http_delivery(
                http_request,
                lambda: _kept_by(request).num_bytes,
                request.parsed.scope,
                lambda: self._table.release(request),
            ),
            lambda: _kept_by(request),
        ):
            yield

    @contextlib.contextmanager
    def waiting_log(self, http_request: web.BaseRequest, log: "EventLog", stop: Callable[[], None]) -> Iterator[None]:
        """The events of a background response wait for a client. `stop` counts it as a reader no more."""

        def kept() -> KeptOutput:  # the last reader has all of it
            return KeptOutput(num_bytes=log.num_counted // max(1, len(log.readers)))

        delivery = http_delivery(http_request, lambda: kept().num_bytes, current_scope(), stop)
        with self._counted(delivery, kept):
            yield

    def add(self, client: Client, num_sent: Callable[[], int], request: Request, stop: Callable[[], None]) -> Delivery:
        """The output of a request waits for a client until `remove`."""

        def release() -> None:
            self._table.release(request)
            stop()

        delivery = Delivery(client, num_sent, release, lambda: _kept_by(request).num_bytes)
        self._kept[delivery] = lambda: _kept_by(request)
        self._deliveries.add(delivery)
        return delivery

    def remove(self, delivery: Delivery) -> None:
        """Idempotent."""
        self._kept.pop(delivery, None)
        self._deliveries.remove(delivery)

    @contextlib.contextmanager
    def _counted(self, delivery: Delivery, kept: Callable[[], KeptOutput]) -> Iterator[None]:
        self._kept[delivery] = kept
        self._deliveries.add(delivery)
        try:
            yield
        finally:
            self.remove(delivery)

    # ------------------------------------------------------------------------------------------------------------ room

    def check_room(self, body_bytes: int, media_bytes: int = 0) -> None:
        """As `Admission.check_room`, and that of its images if there are some."""
        now_s = time.monotonic()
        self._table.admission.media.check_room(open_media_bytes(media_bytes), now_s)
        self._check(lambda admission: admission.check_room(now_s, body_bytes), current_scope())

    def admit(
        self, parsed: ParsedRequest, num_tokens: int, now_s: float, num_bytes: int, num_output_bytes: int
    ) -> None:
        """As `Admission.admit` and `check_share`."""
        num_sequences, keys = len(parsed.prompts) * parsed.num_sequences, self._table.accounts.keys
        if parsed.images:
            media, num = self._table.admission.media, open_media_bytes(images_bytes(parsed.images))
            media.admit(num_sequences, num_tokens, num, now_s)
            own = self._table.newest()
            check_media_share(media, keys, parsed.scope, num_sequences, num_tokens, num, own)

        def check(admission: Admission) -> None:
            admission.admit(num_sequences, num_tokens, now_s, num_bytes, num_output_bytes)
            check_share(*(admission, keys, parsed, num_tokens, self._table.newest()), num_bytes, num_output_bytes)

        self._check(check, parsed.scope)

    def _check(self, check: Callable[[Admission], None], scope: str) -> None:
        """Call `check`, and if it fails only because of what slow clients keep, take that from them. `scope` is the one
        that asks. Raises ApiError as `check`."""
        admission = self._table.admission
        try:
            check(admission)
        except ApiError:
            each = self._candidates(scope) if self._kept else []
            if not each or not _passes(check, _without(admission, each)):
                raise
            # The fewest that suffice.
            nums = range(len(each))
            num = bisect_left(nums, True, key=lambda num: _passes(check, _without(admission, each[:num])))
            self._give_up(each[:num])
            check(admission)

    def free(self, is_enough: Callable[[], bool]) -> None:
        """Take from slow clients what they keep until there is room for requests whose output grows."""
        if self._kept and not is_enough():
            for delivery, _ in self._candidates(NO_SCOPE):
                self._give_up([(delivery, KeptOutput())])
                if is_enough():
                    return

    def _give_up(self, chosen: "list[tuple[Delivery, KeptOutput]]") -> None:
        for delivery, _ in chosen:
            if self._kept.pop(delivery, None) is not None:
                self._deliveries.give_up(delivery)

    def _candidates(self, scope: str) -> "list[tuple[Delivery, KeptOutput]]":
        """What may be given up, in the order in which it is, with what that frees."""
        each = [*self._deliveries.slow(), *self._beyond_their_shares(scope)]
        return [(one, self._kept[one]()) for one in dict.fromkeys(each) if one in self._kept]

    def _beyond_their_shares(self, scope: str) -> list[Delivery]:
        """What waits for clients of keys that have more than their share of the bytes, if the key of `scope` has
        not."""
        keys = self._table.accounts.keys
        if keys is None or len(keys.all) < 2:
            return []
        of_scope: Counter[str] = Counter()
        for one in self._table.newest():
            of_scope[one.request.parsed.scope] += one.num_bytes
        share = self._table.admission.max_bytes // max(1, len(of_scope.keys() | {scope} - {NO_SCOPE}))
        if of_scope[scope] > share:
            return []
        return self._deliveries.old_of(lambda other: other != scope and of_scope[other] > share)


def _kept_by(request: Request) -> KeptOutput:
    """What a request would give back at once if its client lost it."""
    num_sequences = num_tokens = num_base_bytes = 0
    num_bytes = request.num_bytes
    for one in request.prompt_requests:
        if one.is_closed or one.is_preempted:
            num_sequences += one.submit.options.n
            num_tokens += one.num_counted
            num_bytes += one.num_bytes
            num_base_bytes += one.base_bytes
        else:  # schedule still has it
            cost = request.output_cost
            num_bytes += one.num_output_bytes - sum(cost.id_bytes * sequence.num_ids for sequence in one.sequences)
    return KeptOutput(num_sequences, num_tokens, num_bytes, num_base_bytes + request.num_base_bytes)


def _without(admission: Admission, chosen: "list[tuple[Delivery, KeptOutput]]") -> Admission:
    """As it would be."""
    found = copy.copy(admission)
    for _, kept in chosen:
        found.num_sequences -= kept.num_sequences
        found.num_tokens -= kept.num_tokens
        found.num_bytes -= kept.num_bytes
        found.num_base_bytes -= kept.num_base_bytes
    return found


def _passes(check: Callable[[Admission], None], admission: Admission) -> bool:
    try:
        check(admission)
    except ApiError:
        return False
    return True
