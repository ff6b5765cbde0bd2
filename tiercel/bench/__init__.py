"""Measurements that `tiercel bench` makes: requests, load, statistics, reports and tables.

What measures a server over HTTP needs no PyTorch; what measures steps in this process imports the
engine. Nothing here prints: `cli/` does.
"""
