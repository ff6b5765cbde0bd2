"""Makes Linux look like another platform: no `/proc`, and no module `resource` if that is said.

As ``sitecustomize`` of a process it hides them there and sends that process's isolated children
through this file, which hides them again and runs the child's script.
"""

import builtins
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

HIDES_RESOURCE = "HIDES_RESOURCE"
_REAL_OPEN = io.open
_REAL_POPEN = subprocess.Popen.__init__


def hide(*, resource):
    """Let every open of a file below `/proc` fail, and the import of `resource` if so said."""
    builtins.open = io.open = _open
    if resource:
        sys.modules["resource"] = None


def _open(file, *arguments, **options):
    if isinstance(file, str | bytes | os.PathLike) and os.fsdecode(file).startswith("/proc"):
        raise FileNotFoundError(2, "No such file or directory", os.fsdecode(file))
    return _REAL_OPEN(file, *arguments, **options)


def wrap_children():
    """Run isolated children through this file."""

    def start(self, command, *arguments, **options):
        if isinstance(command, list) and command[1:2] == ["-I"]:
            resource = os.environ.get(HIDES_RESOURCE, "")
            command = [*command[:2], str(Path(__file__)), resource, *command[2:]]
        _REAL_POPEN(self, command, *arguments, **options)

    subprocess.Popen.__init__ = start


if __name__ == "__main__":
    hides_resource = bool(sys.argv[1])
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(__file__).parents[2]))  # whatever else is installed
    hide(resource=hides_resource)
    runpy.run_path(sys.argv[0], run_name="__main__")
