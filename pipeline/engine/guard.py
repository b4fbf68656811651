"""Run as a script by the interpreter that has SGLang: ends the engine with the pipeline, then becomes the engine.

    PYTHON guard.py PARENT_PID ARGUMENTS...

asks the kernel to kill this process when its parent ends, however that ends, and then executes
``PYTHON ARGUMENTS...`` in its place (the request outlives ``execv``). SGLang's own children ask the same of it, so
no process of the engine is left behind. It imports nothing of ours: the interpreter may be another environment's.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the request was made; then nobody would ever end this process.
    if os.getppid() != parent:
        sys.exit("the pipeline ended while it was starting this engine")
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


if __name__ == "__main__":
    main()
