"""What every child process does first and last. Run as a script by the supervisor, with the number of an inherited
descriptor that holds the `Launch`."""

import os
import signal
import sys


def adopt_package() -> None:
    """Make `pipeline` importable from the folder above this file's, and nothing else that lies beside it.

    Children run with `python -P`, so the folder that was current, with its `config.py` perhaps, is not searched; nor is
    the project's root, whose folder `kernels` would be taken for the package of that name which transformers imports.
    """
    import importlib.util

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "pipeline",
        os.path.join(folder, "__init__.py"),
        submodule_search_locations=[folder],
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pipeline"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    # A service manager's SIGTERM reaches every process; the supervisor alone decides what it means, and says `Stop`.
    for _number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(_number, signal.SIG_IGN)
    adopt_package()
    from pipeline.runtime import child

    child.main(int(sys.argv[1]))
