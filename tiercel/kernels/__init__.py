"""Device code and its launchers, in families; `cuda/` mirrors them with the CUDA C++ sources.

Only `ops/` calls launchers. A launcher allocates nothing and checks nothing; a `select_*` function
chooses its configuration and is pure.
"""
