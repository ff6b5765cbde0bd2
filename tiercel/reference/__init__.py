"""Oracles: the formula of each op in plain float64, for tests and benchmarks alone.

An oracle imports nothing that it judges, and production code imports no oracle.
"""
