"""What a request is: its inputs, state, results and text, and what is scored.

The host's view of one sequence, shared by the scheduler, the engine, the API and the server.
Free of PyTorch.
"""
