"""A replica that dies when it gets certain rows, for Replicas' `replica_module`.

It dies of rows whose prompt holds the environment variable FATAL_TEXT. HOW says whether it is killed or raises.
"""

import os
import signal

import nanovllm.replicas.worker
from nanovllm.row_stream import RowStream

_add = RowStream._add


def _die_of(self: RowStream, row, adapter):
    if os.environ["FATAL_TEXT"] in (row.prompt.text or ""):
        if os.environ.get("HOW") == "raises":
            raise MemoryError("the row is too large")
        os.kill(os.getpid(), signal.SIGKILL)
    return _add(self, row, adapter)


if __name__ == "__main__":
    RowStream._add = _die_of
    nanovllm.replicas.worker.main()
