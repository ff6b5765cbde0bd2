"""The loop around an engine, with an engine that a test can look into."""

import threading
import time
from collections import deque

import pytest

from tests.patience import PATIENCE_S, wait_for
from tiercel.engine.engine import RequestUpdate
from tiercel.engine.loop import EngineLoop
from tiercel.errors import InvalidRequestError, OutOfMemoryError
from tiercel.faults import Faults
from tiercel.params import SamplingParams
from tiercel.request.request import Request, Status


def make_request(name="a", max_tokens=3):
    return Request(name, [1, 2], SamplingParams(), 0, 0, frozenset(), max_tokens)


class FakeEngine:
    """Two rows; a token per step for each; the newest gives way when `squeeze` is set."""

    def __init__(self):
        self.waiting, self.running = deque(), []
        self.log = []
        self.squeeze = False
        self.on_step = lambda: None

    @property
    def has_work(self):
        return bool(self.waiting or self.running)

    def submit(self, request):
        if request.max_tokens > 100:
            raise InvalidRequestError("too long")
        self.log.append(("submit", request.request_id))
        self.waiting.append(request)

    def _finish(self, request, reason, stop_reason=None):
        if request.status is Status.FINISHED:
            return
        (self.running if request in self.running else self.waiting).remove(request)
        request.status = Status.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason

    def abort(self, request):
        self.log.append(("abort", request.request_id))
        self._finish(request, "abort")

    def stop(self, request, stop_reason):
        self.log.append(("stop", request.request_id))
        self._finish(request, "stop", stop_reason)

    def step(self):
        self.on_step()
        self.log.append(("step",))
        while self.waiting and len(self.running) < 2 and not self.squeeze:
            request = self.waiting.popleft()
            request.status = Status.RUNNING
            self.running.append(request)
        if self.squeeze and len(self.running) > 1:
            request = self.running.pop()
            request.status = Status.WAITING
            self.waiting.appendleft(request)
        updates = []
        for request in list(self.running):
            request.output_token_ids.append(7)
            if len(request.output_token_ids) >= request.max_tokens:
                self._finish(request, "length")
            updates.append(RequestUpdate(request, (7,)))
        return updates


class Listener:
    """Keeps what it hears."""

    def __init__(self):
        self.steps, self.refused, self.num_idle = [], [], 0
        self.ends = {}
        self.idle = threading.Event()
        self.after_step = lambda result: None

    def on_step(self, result):
        self.idle.clear()
        self.steps.append(result)
        for update in result.updates:
            if update.request.finish_reason:
                assert update.request.request_id not in self.ends
                self.ends[update.request.request_id] = update.request.finish_reason
        self.after_step(result)

    def on_refused(self, request, error):
        self.refused.append((request, error))

    def on_idle(self):
        self.num_idle += 1
        self.idle.set()


class Running:
    """A loop on its thread, for the length of a block."""

    def __init__(self, faults=None):
        self.engine, self.listener = FakeEngine(), Listener()
        self.loop = EngineLoop(self.engine, self.listener, faults)
        self.error = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.loop.run()
        except RuntimeError as error:
            self.error = error

    def __enter__(self):
        return self

    def start(self):
        self.thread.start()

    def settle(self):
        """Wait until all that was asked for is done."""
        done = threading.Event()
        self.loop.call(done.set)
        assert done.wait(PATIENCE_S)
        wait_for(lambda: not self.engine.has_work)

    def __exit__(self, *_):
        self.loop.shutdown()
        if self.thread.is_alive():
            self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def test_requests_run_to_their_ends_together():
    with Running() as running:
        for name, max_tokens in (("a", 3), ("b", 1), ("c", 2)):
            running.loop.submit(make_request(name, max_tokens))
        running.start()
        running.settle()
        assert running.listener.ends == {"a": "length", "b": "length", "c": "length"}
        entered = [[r.request_id for r in s.entered] for s in running.listener.steps]
        assert entered[:2] == [["a", "b"], ["c"]]
        assert not any(entered[2:])
        assert running.loop.num_live == 0
        times = [(s.started_s, s.seconds) for s in running.listener.steps]
        assert times == sorted(times)
        assert all(seconds >= 0 for _, seconds in times)


def test_an_abort_is_done_before_the_next_step():
    with Running() as running:
        requests = [make_request(name, 100) for name in "ab"]
        in_step, may_go = threading.Event(), threading.Event()

        def on_step():
            in_step.set()
            assert may_go.wait(PATIENCE_S)

        running.engine.on_step = on_step
        for request in requests:
            running.loop.submit(request)
        running.start()
        assert in_step.wait(PATIENCE_S)
        running.loop.abort(requests[0])
        running.loop.stop(requests[1], "x")
        may_go.set()
        running.settle()
        log = running.engine.log
        assert log == [("submit", "a"), ("submit", "b"), ("step",), ("abort", "a"), ("stop", "b")]
        assert [r.finish_reason for r in requests] == ["abort", "stop"]
        assert running.listener.ends == {}


def test_calls_are_made_in_their_order():
    with Running() as running:
        first, second = make_request("a"), make_request("b")
        running.loop.submit(first)
        running.loop.abort(first)
        running.loop.abort(second)  # it is not there yet
        running.loop.submit(second)
        running.start()
        running.settle()
        assert first.finish_reason == "abort"
        assert second.finish_reason == "length"


def test_aborts_and_stops_of_what_has_ended_do_nothing():
    with Running() as running:
        request = make_request("a", 1)
        running.loop.submit(request)
        running.start()
        running.settle()
        running.loop.abort(request)
        running.loop.stop(request, "x")
        running.settle()
        assert running.engine.log == [("submit", "a"), ("step",)]
        assert request.finish_reason == "length"


@pytest.mark.reliability
def test_a_request_that_is_refused_fails_alone():
    with Running() as running:
        requests = [make_request("a"), make_request("b", 101), make_request("c")]
        for request in requests:
            running.loop.submit(request)
        running.start()
        running.settle()
        ((request, error),) = running.listener.refused
        assert request is requests[1]
        assert isinstance(error, InvalidRequestError)
        assert running.listener.ends == {"a": "length", "c": "length"}


def test_an_idle_loop_sleeps():
    with Running() as running:
        running.start()
        assert running.listener.idle.wait(PATIENCE_S)
        clock = time.pthread_getcpuclockid(running.thread.ident)  # nothing else counts
        before = time.clock_gettime(clock)
        time.sleep(0.2)
        assert time.clock_gettime(clock) - before < 0.1
        assert running.listener.num_idle == 1
        running.loop.submit(make_request())
        running.settle()
        assert running.listener.idle.wait(PATIENCE_S)
        assert running.listener.num_idle >= 2


def test_preempted_requests_are_counted_and_enter_once():
    with Running() as running:
        running.loop.submit(make_request("a", 6))
        running.loop.submit(make_request("b", 6))
        engine = running.engine

        def after_step(result):
            engine.squeeze = len(running.listener.steps) in (2, 3)

        running.listener.after_step = after_step
        running.start()
        running.settle()
        steps = running.listener.steps
        assert [s.num_preempted for s in steps[:4]] == [0, 0, 1, 0]
        assert sum(len(s.entered) for s in steps) == 2
        assert running.listener.ends == {"a": "length", "b": "length"}


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_late_news_of_a_request_that_was_ended_are_dropped(end):
    """Its last step was under way: the engine reports on it once more."""
    with Running() as running:
        engine, late, requests = running.engine, [], [make_request("a", 100), make_request("b", 9)]
        step, finish = engine.step, engine._finish

        def ending(request, reason, stop_reason=None):
            finish(request, reason, stop_reason)
            if reason == end:
                late.append(RequestUpdate(request, (7,)))

        def stepping():
            told = [*late, *step()]
            late.clear()
            return told

        engine.step, engine._finish = stepping, ending

        def after_step(_):
            if len(running.listener.steps) == 2:
                how = getattr(running.loop, end)
                how(requests[0], *(["x"] if end == "stop" else []))

        running.listener.after_step = after_step
        for request in requests:
            running.loop.submit(request)
        running.start()
        running.settle()
        told = [[u.request.request_id for u in s.updates] for s in running.listener.steps]
        assert told == [["a", "b"]] * 2 + [["b"]] * 7
        assert running.listener.ends == {"b": "length"}
        assert running.loop.num_live == 0


@pytest.mark.reliability
def test_out_of_memory_ends_the_newest_request_and_the_others_go_on():
    with Running(Faults.parse("oom@2", is_enabled=True)) as running:
        requests = [make_request(name, 4) for name in "abc"]
        for request in requests:
            running.loop.submit(request)
        running.start()
        running.settle()
        ends = running.listener.ends
        assert ends == {"a": "length", "b": "error", "c": "length"}
        assert requests[1].stop_reason == "out_of_memory"


@pytest.mark.reliability
def test_any_other_error_of_a_step_ends_the_loop_and_names_its_requests():
    def on_step():
        raise RuntimeError("CUDA error")

    with Running() as running:
        for name in "abc":
            running.loop.submit(make_request(name, 4))

        def later():
            if len(running.listener.steps) == 2:
                on_step()

        running.engine.on_step = later
        running.start()
        running.thread.join(PATIENCE_S)
        assert str(running.error) == "CUDA error"
        assert [r.request_id for r in running.loop.running()] == ["a", "b"]


def test_out_of_memory_without_a_request_to_blame_is_no_secret():
    class Hollow(FakeEngine):
        has_work = True

        def step(self):
            raise OutOfMemoryError("nothing fits")

    with pytest.raises(OutOfMemoryError, match="nothing fits"):
        EngineLoop(Hollow(), Listener()).run()


def test_shutdown_aborts_what_is_live():
    with Running() as running:
        requests = [make_request(name, 100) for name in "abc"]
        for request in requests:
            running.loop.submit(request)
        stepped = threading.Event()
        running.listener.after_step = lambda _: (stepped.set(), time.sleep(0.001))
        running.start()
        assert stepped.wait(PATIENCE_S)
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert not running.engine.has_work


def test_many_threads_may_call():
    with Running() as running:
        running.start()

        def client(number):
            for i in range(50):
                request = make_request(f"{number}-{i}", 2)
                running.loop.submit(request)
                if i % 3 == 0:
                    running.loop.abort(request)

        threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        running.settle()
        submitted = [entry for entry in running.engine.log if entry[0] == "submit"]
        assert len(submitted) == 200
        assert len(running.listener.ends) >= 4 * 33
        assert running.loop.num_live == 0
