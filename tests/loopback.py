"""Runs an ASGI application on its own loopback port, for as long as a test needs it."""

import contextlib
import threading
import time

import uvicorn

from tests.patience import PATIENCE_S


@contextlib.contextmanager
def served(app):
    """Serve `app` in a thread; yields its address."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        deadline = time.perf_counter() + PATIENCE_S
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.perf_counter() < deadline
            time.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        server.force_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
