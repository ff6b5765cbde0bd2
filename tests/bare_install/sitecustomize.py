"""Python imports this first, in child processes too: what HIDDEN_MODULES names is not installed."""

import importlib.machinery
import os
import sys

HIDDEN = frozenset(os.environ["HIDDEN_MODULES"].split(","))


class Finder(importlib.machinery.PathFinder):
    """As the usual finder, without the hidden modules."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Finder
