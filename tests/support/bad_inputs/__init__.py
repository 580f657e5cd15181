"""A table of bad inputs over all public functions, made from their signatures.

`scenes.py` calls every function once with good arguments. `kinds.py` says of which kind each argument is, and what is
bad for that kind. `rows.py` makes the table and judges a row, `expected.py` has what differs from a kind, `told.txt`
what is known to be told otherwise, and `child.py` runs rows in processes that may end.
"""
