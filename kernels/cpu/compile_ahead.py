"""Compiles the kernels for this machine before they are needed:  python -m pipeline.kernels.cpu.compile_ahead

By default the quick library, as while packages are downloaded; with `--optimized CACHE_ROOT ISA` the other one, its
compiler at the lowest priority, for the next server. It needs nothing but Python and a compiler, and it ends with the
process that started it. If it fails, the server compiles, and reports what is wrong.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1
ENDS = (signal.SIGTERM, signal.SIGHUP)
"""The parent has ended, or its terminal was closed."""
FIRST_TO_END = b"1000"
"""For /proc/self/oom_score_adj: a compiler takes more memory than small models, and must not cost a server its own."""
OPTIMIZED_TIMEOUT_S = 3600.0
"""At the lowest priority, beside a server that computes on all cores, the compiler gets little of them."""
END_S = 2.0

RUN = (
    "import sys; sys.path.append(sys.argv.pop(1)); from pipeline.kernels.cpu.compile_ahead import main; "
    "main(sys.argv[1:])"
)


def start(isa: str, cache_root: Path | None) -> "subprocess.Popen[bytes] | None":
    """Start to compile the optimized library in a process of its own; None if it can't be started."""
    root = Path(__file__).absolute().parents[3]  # of the package; links are left as they are
    try:
        process = subprocess.Popen(
            (sys.executable, "-P", "-S", "-c", RUN, str(root), "--optimized", str(cache_root or ""), isa),
            process_group=0,  # only the supervisor gets a terminal's Ctrl-C
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    # The executor waits for it only at its own end: until then it would stay a zombie.
    threading.Thread(target=process.wait, name="compile-ahead", daemon=True).start()
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    """End what `start` has started, and give it a moment to remove what is incomplete. On a machine too busy for that,
    it goes on with it alone: a killed one would leave it."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)


def main(args: list[str]) -> None:
    """Compile, and end when the parent ends. Raises nothing that a user must see."""
    parent = os.getppid()
    for number in ENDS:
        signal.signal(number, _interrupted)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent or parent == 1:
        return
    from pipeline.kernels.cpu.build import COMPILE_TIMEOUT_S, build
    from pipeline.kernels.cpu.compiler import BuildError
    from pipeline.kernels.cpu.isa import Isa, available

    isa: Isa
    root: Path | None = None
    timeout_s, niceness = COMPILE_TIMEOUT_S, 0
    is_quick = args[:1] != ["--optimized"]
    if is_quick:
        isa = available()[0]
    else:
        root, isa = Path(args[1]) if args[1] else None, args[2]  # type: ignore[assignment]
        timeout_s = OPTIMIZED_TIMEOUT_S
        niceness = 19
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(FIRST_TO_END)
    with contextlib.suppress(BuildError, OSError, KeyboardInterrupt):
        say = partial(print, flush=True)
        build(isa, say, cache_root=root, quick=is_quick, timeout_s=timeout_s, niceness=niceness)


def _interrupted(*_: object) -> NoReturn:
    for number in ENDS:
        signal.signal(number, lambda *_: None)  # with SIG_IGN, one that is pending would be an error
    raise KeyboardInterrupt  # which removes what is incomplete


if __name__ == "__main__":
    main(sys.argv[1:])
