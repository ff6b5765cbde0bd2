"""Python imports this first: see `hide.py`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import hide
import psutil  # noqa: F401 - on Linux it imports `resource` itself; elsewhere it does not

hide.hide(resource=bool(os.environ.get(hide.HIDES_RESOURCE)))
hide.wrap_children()
