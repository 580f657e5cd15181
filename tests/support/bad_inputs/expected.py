"""What must come where a row differs from its kind: (names of rows, outcome, a pattern that the message must hold).

An empty pattern stands for the argument's name. The first line that fits holds.
"""

EXPECTED: list[tuple[str, str, str]] = []
