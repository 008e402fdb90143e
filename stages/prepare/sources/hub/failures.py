"""The messages for users when the hub can't be asked, or refuses a model."""

import errno
from collections.abc import Callable

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pipeline.stages.prepare.sources.hub.local import cache_folder
from pipeline.stages.prepare.sources.hub.retries import TRANSPORT, asked_wait_s, first_line, status_of, without_secrets
from pipeline.stages.prepare.sources.source import HubSource, ModelError

FAILURES: tuple[type[Exception], ...] = (HfHubHTTPError, OfflineModeIsEnabled, HFValidationError, *TRANSPORT)

FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EISDIR, errno.EEXIST)
OFFLINE_ADVICE = "; models on this machine need no connection: use a folder or a .gguf file as model"
RESUMED = "; the next try goes on where this one ended"


def reported(source: HubSource, call: Callable[[], None]) -> None:
    """Make a call that asks the hub. Raises ModelError with a message for the user in place of huggingface_hub's and
    the system's errors."""
    try:
        call()
    except FAILURES as error:
        raise ModelError(words(error, source)) from error
    except OSError as error:
        cache = cache_folder()
        if error.errno in FULL:
            raise ModelError(
                f"no space is left in {cache} to download {source}: free disk space, or set HF_HOME{RESUMED}"
            ) from error
        if error.errno in UNWRITABLE:
            raise ModelError(
                f"cannot write {cache} ({error.strerror}): set HF_HOME to a folder you can write to, with room for "
                "the model"
            ) from error
        raise ModelError(
            f"{without_secrets(constants.ENDPOINT)} returned an error for {source} ({first_line(error)})"
        ) from error


def words(error: Exception, source: HubSource) -> str:
    """The message for an error of huggingface_hub or of the connection."""
    hub = without_secrets(constants.ENDPOINT)
    match error:
        case GatedRepoError():
            has_token = "the current token has no access" if get_token() else "no token is set"
            return (
                f"{source} is gated: accept its terms at {hub}/{source.repo}, and set HF_TOKEN to a token with read "
                f"access ({has_token})"
            )
        case RevisionNotFoundError():
            return f"{source.repo} has no revision {source.revision!r} on {hub}: check the part after '@'"
        case RemoteEntryNotFoundError():
            return f"{hub} lists a file of {source} that it doesn't have ({first_line(error)}): try again later"
        case DisabledRepoError():
            return f"{source} was disabled on {hub}"
        case RepositoryNotFoundError():
            here = f", and there is no file {source.repo}/{source.file} here" if source.file else ""
            return (
                f"{hub} has no model {source.repo}, or it is private{here}: check the name, or set HF_TOKEN to a token "
                "with read access"
            )
        case HFValidationError():
            return f"model {source}: {first_line(error)}"
        case HfHubHTTPError():
            return _words_of_status(error, source)
        case _:
            cause = error.__cause__ or error
            return (
                f"cannot download {source}: {hub} is not reachable, or the connection broke ({first_line(cause)})"
                f"{OFFLINE_ADVICE}"
            )


def _words_of_status(error: HfHubHTTPError, source: HubSource) -> str:
    hub = without_secrets(constants.ENDPOINT)
    match status := status_of(error):
        case 401 | 403:
            return f"{hub} refused the token in HF_TOKEN for {source} ({status})"
        case 429:
            wait_s = asked_wait_s(error)
            when = "later" if wait_s is None else f"in {wait_s:.0f} s"
            more = "" if get_token() else "; requests with a token (HF_TOKEN) have a higher limit"
            return f"{hub} has had too many requests from here (429) to download {source}: try again {when}{more}"
        case int() if status >= 500:
            return f"{hub} returned an error for {source} ({status}) several times: try again later{RESUMED}"
    return f"{hub} returned an error for {source} ({first_line(error)})"
