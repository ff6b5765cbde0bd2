"""Grammars are compiled beside the steps, those of different clients in turn."""

import threading
from dataclasses import replace

import pytest

from tests.patience import PATIENCE_S, wait_for
from tests.tiny_llm import LLAMA, greedy
from tiercel.config import LoadOptions
from tiercel.engine.load import load_model
from tiercel.errors import InvalidRequestError
from tiercel.grammar.spec import GrammarSpec
from tiercel.ipc.messages import Abort, NewRequest, Outputs, Refused
from tiercel.ipc.session import EngineSession


class Compiler:
    """Makes nothing, and nothing before `permit` says so; `begun` names the grammars."""

    def __init__(self):
        self.begun = []
        self.permits = threading.Semaphore(0)

    def make(self, grammar, stop_ids):
        self.begun.append(grammar.text)
        assert self.permits.acquire(timeout=PATIENCE_S)
        if grammar.text == "refused":
            raise InvalidRequestError("no.")
        if grammar.text == "broken":
            raise MemoryError("the compiler")

    def permit(self, count=1):
        self.permits.release(count)


class Running:
    """A session whose loop runs on a thread; `sent` are its messages."""

    def __init__(self):
        self.loaded = load_model(LLAMA, LoadOptions(device="cpu"), None)
        self.compiler, self.sent, self.failed = Compiler(), [], []
        loaded = replace(self.loaded, matchers=self.compiler)
        self.session = EngineSession(loaded, self.sent.append)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.keys = {}

    def _run(self):
        try:
            self.session.loop.run()
        except MemoryError as error:
            self.failed.append(error)

    def ask(self, name, client="a", *, has_grammar=True):
        request = self.loaded.inputs().request([5, 6], greedy(2), 0)
        request.request_id, request.client = name, client
        request.grammar = GrammarSpec(name) if has_grammar else None
        self.keys[name] = len(self.keys) + 1
        self.session.handle(NewRequest.of(self.keys[name], request))

    def has_ended(self, name):
        deltas = [d for m in self.sent if isinstance(m, Outputs) for d in m.deltas]
        return any(d.key == self.keys[name] and d.finish_reason for d in deltas)

    def close(self):
        self.compiler.permit(100)
        self.session.loop.shutdown()
        self.thread.join(PATIENCE_S)


@pytest.fixture
def running():
    made = Running()
    yield made
    made.close()


def test_steps_and_other_requests_do_not_wait_for_a_grammar(running):
    running.ask("slow")
    wait_for(lambda: running.compiler.begun == ["slow"])
    running.ask("plain", has_grammar=False)
    wait_for(lambda: running.has_ended("plain"))
    assert not running.has_ended("slow")
    running.compiler.permit()
    wait_for(lambda: running.has_ended("slow"))


def test_one_grammar_of_another_client_waits_for_one_of_thirty(running):
    for number in range(30):
        running.ask(f"a{number}")
    wait_for(lambda: running.compiler.begun)
    running.ask("b0", client="b")
    running.compiler.permit(31)
    wait_for(lambda: running.has_ended("a29"))
    assert running.compiler.begun.index("b0") <= 2
    own = [name for name in running.compiler.begun if name != "b0"]
    assert own == [f"a{number}" for number in range(30)]


def test_a_request_that_was_aborted_meanwhile_is_neither_compiled_nor_run(running):
    for name in ("under way", "waits", "last"):
        running.ask(name)
    wait_for(lambda: running.compiler.begun)
    for name in ("under way", "waits"):
        running.session.handle(Abort(running.keys[name]))
    running.compiler.permit(3)
    wait_for(lambda: running.has_ended("last"))
    assert running.compiler.begun == ["under way", "last"]
    assert not running.has_ended("under way")
    assert not running.loaded.engine.has_work


def test_what_the_compiler_refuses_is_told_and_what_breaks_it_ends_the_engine(running):
    running.compiler.permit(2)
    running.ask("refused")
    wait_for(lambda: any(isinstance(m, Refused) for m in running.sent))
    running.ask("broken")
    running.thread.join(PATIENCE_S)
    assert [str(error) for error in running.failed] == ["the compiler"]
