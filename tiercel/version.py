"""The version of the package, for those that may not import its root."""

from typing import Final

__version__: Final = "0.1.0"
