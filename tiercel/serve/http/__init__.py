"""HTTP plumbing: protocol bounds, bodies, access, errors, logs, metrics, tracing, SSE.

Knows no route and no model.
"""
