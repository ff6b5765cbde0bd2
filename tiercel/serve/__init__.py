"""The HTTP server: OpenAI's, Anthropic's and scoring routes in front of an engine process.

`app.py` puts routes together, `server.py` runs them. Below: `http/` (plumbing), `generation/` (from
a request to streamed output), `api/` (routes), `lifecycle/` (start, readiness). Free of PyTorch.
"""
