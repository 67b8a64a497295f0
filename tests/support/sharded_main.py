"""main.py where accelerate shards on the processor too, for ``accelerate launch``."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from support.small_processes import sharded  # noqa: E402

if __name__ == "__main__":
    sys.exit(sharded(*sys.argv[1:]))
