"""The processes that render chat templates; their messages are described in the worker's file."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tiercel.text.child_client import ChildProgram, ChildWorker, ChildWorkers

PROGRAM: Final = ChildProgram(
    script=Path(__file__).with_name("template_worker.py"),
    packages=("jinja2", "markupsafe", "tiercel"),
    name="chat template",
)


class TemplateWorker(ChildWorker):
    """A child process that renders templates."""

    def __init__(self) -> None:
        super().__init__(PROGRAM)


class TemplateWorkers(ChildWorkers):
    """Several template workers."""

    def __init__(self, count: int) -> None:
        super().__init__(PROGRAM, count)
