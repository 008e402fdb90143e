"""The rules of a listener: what a request must satisfy before a route sees it, and before its body is read.

| | with API keys | without |
|---|---|---|
| key | required, except for GET and HEAD of `open_paths` | – |
| `Host`, `Origin` | – | must be allowed (access/origins.py) |
| content type of a POST | JSON | JSON |

So each request has a key, or was not sent by a web page of another site, or only reads one of the open paths. The admin
listener has no keys, whether the server has some or not.
"""

from collections.abc import Container

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.http_server.access.cors import Cors
from pipeline.http_server.access.guard import Handle, require_allowed_origin, require_key
from pipeline.http_server.access.origins import OriginPolicy
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.expect import refuse_unknown
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.runtime.security.api_keys import Keys


class ListenerRules:
    """The rules of one listener. Make them with `main` or `admin`."""

    def __init__(
        self,
        policy: OriginPolicy,
        rejection_log: RejectionLog,
        *,
        keys: Keys | None = None,
        open_paths: Container[str] = (),
        cors: Cors | None = None,
        access_log: AccessLog | None = None,
    ) -> None:
        """`policy` is used if there are no `keys`. `cors` answers preflights."""
        self._access_log = access_log
        self._policy = policy
        self.rejection_log = rejection_log
        self._keys = keys
        self._open_paths = open_paths
        self._cors = cors

    @classmethod
    def main(
        cls,
        settings: GatewaySettings,
        rejection_log: RejectionLog,
        *,
        keys: Keys | None,
        open_paths: Container[str],
        cors: Cors,
        scheme: str = "http",
        access_log: AccessLog | None = None,
    ) -> "ListenerRules":
        """Those of a listener for clients, whose own origin has `scheme`."""
        policy = OriginPolicy(settings, scheme)
        return cls(policy, rejection_log, keys=keys, open_paths=open_paths, cors=cors, access_log=access_log)

    @classmethod
    def admin(
        cls, settings: GatewaySettings, rejection_log: RejectionLog, access_log: AccessLog | None = None
    ) -> "ListenerRules":
        """Those of the admin listener, which has no keys."""
        return cls(OriginPolicy(settings, is_admin=True), rejection_log, access_log=access_log)

    def wrap(self, handle: Handle) -> Handle:
        """A handler that passes on to `handle` what satisfies the rules, and answers everything else."""
        handle = refuse_unknown(handle)
        if self._keys is not None:
            guarded, check = require_key(handle, self._keys, self._open_paths), None
        else:
            guarded, check = require_allowed_origin(handle, self._policy), self._policy.check
        if self._cors is not None:
            guarded = self._cors.wrap(guarded, check)
        guarded = self.rejection_log.wrap(guarded)
        return guarded if self._access_log is None else self._access_log.wrap(guarded)
