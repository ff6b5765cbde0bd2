"""The engine process, its client in the HTTP process, and the messages between them.

`messages.py` is the wire, `client.py` and `supervisor.py` the HTTP side (no PyTorch), `process.py`
and `session.py` the engine's side. `asyncio_bridge.py` joins an engine to event loops in one
process.
"""
