"""The command `tiercel`, also as `python -m tiercel`: Ctrl-C ends its imports quietly too."""

import importlib
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Import the command line, run it and exit."""
    try:
        with importlib.import_module("tiercel.cold_start").paused_collector():
            command_line = importlib.import_module("tiercel.cli.main")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(command_line.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
