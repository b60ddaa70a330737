"""torchrun whose exit code is that of the training.

`python -m atoll.launch.torchrun` takes what `python -m torch.distributed.run` takes and does the same. But
that one ends with 1 whatever its processes ended with, so that a run that saved and may go on (75) and one
that a user has to correct (2) look alike; and told to leave, it kills processes that save for over 30 s.
"""

import sys
from collections.abc import Sequence

from atoll.base.errors import INTERRUPTED

PATIENCE = 600  # seconds that processes have for saving when they are told to leave


def main(argv: Sequence[str]) -> int:
    """Run the processes of this node to their end.

    Returns 0 when all finished; 75 when the run was told to leave or one of them says so; 2 when one of them
    met a mistake of the user's; else what the first one that failed ended with.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = torchrun.get_args_parser().parse_args(argv)
    if hasattr(options, "shutdown_timeout"):  # not in older versions of torch
        options.shutdown_timeout = PATIENCE
    try:
        torchrun.run(options)
    except ChildFailedError as error:
        # One rank that was told to leave makes the others fail in their next collective: its code counts.
        codes = [failure.exitcode for _, failure in sorted(error.failures.items())]
        # A process that a signal ended has a negative code, which no process can exit with.
        return next((code for code in (INTERRUPTED, 2, *codes) if code in codes and code > 0), 1)
    except SignalException:
        return INTERRUPTED  # what was committed counts, and the same command goes on from there
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
