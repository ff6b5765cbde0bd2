"""HTTP without knowledge of models: protocol limits, access, bodies, errors, logs, metrics.

Nothing here imports the server's state; what a function needs is an argument.
"""
