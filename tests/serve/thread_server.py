"""The application behind real sockets in this process, around a fake engine and short deadlines."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass

import httpx

from tests.patience import PATIENCE_S, wait_for
from tests.serve.fake_client import FakeClient, fake_state
from tests.serve.harness import RunningServer
from tiercel.params import Limits
from tiercel.serve.app import create_app
from tiercel.serve.server import Server, bind, make_config


@dataclass
class ThreadServer(RunningServer):
    """Has the methods of a server process; `process` and `log_path` are None."""

    state: object = None
    client: FakeClient | None = None
    loop: asyncio.AbstractEventLoop | None = None


@contextlib.contextmanager
def thread_server(*, limits=None, client=None, extra_routes=(), drain_seconds=0.0, **settings):
    """Serve in a thread for the length of the block."""
    client = client or FakeClient()
    state = fake_state(client, limits=limits or Limits(), **settings)
    app = create_app(state)
    app.router.routes[:0] = extra_routes
    sockets = bind("127.0.0.1", 0)
    server = Server(make_config(app, state, state.settings.limits), state, drain_seconds)
    loops = []

    async def serve():
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets)

    thread = threading.Thread(target=_run, args=(server, serve), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    running = ThreadServer(None, url, None, state=state, client=client)
    try:
        wait_for(lambda: state.model is not None or not thread.is_alive())
        running.loop = loops[0]
        yield running
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def _run(server, serve):
    with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
        runner.run(serve())


def is_healthy(server):
    """Whether the server answers."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{server.url}/health", timeout=PATIENCE_S).status_code == 200
    return False
