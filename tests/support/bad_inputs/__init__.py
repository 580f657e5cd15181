"""A table of bad inputs over all public functions, made from their signatures.

`scenes.py` calls every function once with good arguments; `kinds.py` says for each argument of which kind it is, and what
is bad for that kind; `rows.py` makes the table and says what must come; `child.py` runs rows in processes that may end.
"""
