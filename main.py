"""Run the experiments that a JSON file describes. The same as the command pycil-wsc; see README.md."""

import sys

from pycil_wsc.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
