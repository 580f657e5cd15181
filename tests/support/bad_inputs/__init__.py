"""A table of bad inputs over all public functions, made from their signatures.

`scenes` has a call of every function with good arguments, made of what `scene.py` defines. `arguments.py` gives each
argument a kind, and `kinds.py` each kind its bad values. `rows.py` makes the table and judges a row. `expected.py`
lists the rows whose outcome differs from that of their kind. `child.py` runs rows in child processes, which a row may
crash.
"""
