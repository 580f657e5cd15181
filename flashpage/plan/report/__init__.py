"""A plan as an object that explains and draws itself."""
