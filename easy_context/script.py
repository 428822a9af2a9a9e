"""How the scripts end before their time: with a message, on every rank, without leaving another rank waiting.

A rank that has failed leaves at once. Python's own way out can wait, in destructors of process groups or of CUDA, for
ranks that wait for this one. What the others notice depends on the backend: gloo reports the lost connection in the
operation that waits for it; an NCCL kernel waits on, until the launcher (torchrun, accelerate launch) sees the failed
process and stops the other ones.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable

FIRST_FAULT_SECONDS = 3  # what a rank that only follows another one's failure leaves to it, so that it is heard first

GPU_MEMORY = (
    "the GPU's memory is full. Take shorter sequences or more GPUs; train.py: let the planner choose (--keep auto), "
    "or keep less on the GPU (tier host in --keep), with more --head-groups or a smaller --tile-size"
)


def run(main: Callable[[], None]) -> None:
    """Run a script. A wrong setting, a missing file or memory that does not suffice becomes one line on standard error
    and exit code 2, any other exception its traceback and exit code 1.

    Ranks find a wrong setting together, and rank 0 says so for all. The others wait for the launcher to stop them; one
    that found a fault of its own (a file that its node lacks) is still there a moment later, and speaks. So does a rank
    that has lost another one, in one line.
    """
    rank = os.environ.get("RANK", "0")
    place = "error" if rank == "0" else f"error on rank {rank}"
    try:
        main()
    except (ValueError, OSError, MemoryError) as error:
        if rank != "0":
            time.sleep(FIRST_FAULT_SECONDS)
        _leave(2, f"{place}: {' '.join(str(error).split())}")
    except Exception as error:
        if _is_out_of_gpu_memory(error):
            _leave(2, f"{place}: {str(error).partition('. ')[0]}: {GPU_MEMORY}")
        if _has_lost_a_rank(error):
            time.sleep(FIRST_FAULT_SECONDS)
            _leave(1, f"{place}: the connection to another rank is lost ({str(error).splitlines()[0]})")
        _tell_the_launcher(error)
        _leave(1, f"{traceback.format_exc()}{place}: {type(error).__name__}: {error}")


def _is_out_of_gpu_memory(error: Exception) -> bool:
    from torch import OutOfMemoryError

    return isinstance(error, OutOfMemoryError)


def _has_lost_a_rank(error: Exception) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or "/gloo/transport/" in str(error)


def _tell_the_launcher(error: Exception) -> None:
    """The launcher's last words are then this traceback."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)


def _leave(code: int, message: str) -> None:
    print(f"\n{message}", file=sys.stderr, flush=True)  # a progress bar may have begun a line
    sys.stdout.flush()
    os._exit(code)
