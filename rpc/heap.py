"""What the garbage collector need not look at."""

import atexit
import gc
import sys


def settle() -> None:
    """What lives by now is taken to live as long as the process. For when the libraries are imported, and before there
    is anything that may go.

    A full collection that goes through torch's 200,000 objects stops all threads for 140 ms (Zen 3), and the
    interpreter, which does the same as it ends, takes 0.7 s.
    """
    gc.collect()
    gc.freeze()
    atexit.register(_thaw)


def _thaw() -> None:
    if "triton" in sys.modules:
        gc.unfreeze()  # its bindings print what of theirs is not collected in the end
