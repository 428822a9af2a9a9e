"""How the scripts end where a setting is wrong: one line, on every rank together."""

import os
import sys
import time
from collections.abc import Callable


def run(main: Callable[[], None]) -> None:
    """Run a script. A wrong setting or a missing file becomes one line on standard error and exit code 2.

    Ranks find the same fault together, and rank 0 says so for all. The others wait for the launcher to stop
    them; one that found a fault of its own (a file that its node lacks) is still there a moment later, and
    speaks.
    """
    rank = os.environ.get("RANK", "0")
    try:
        main()
    except (ValueError, OSError) as error:
        if rank != "0":
            time.sleep(3)
        place = "error" if rank == "0" else f"error on rank {rank}"
        print(f"{place}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(2)  # without waiting for threads of a process group whose other ranks are gone
