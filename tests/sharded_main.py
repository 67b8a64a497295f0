"""main.py where accelerate shards on the processor too, for ``accelerate launch``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from small_processes import sharded  # noqa: E402

if __name__ == "__main__":
    sys.exit(sharded(*sys.argv[1:]))
