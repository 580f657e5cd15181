"""Shared by every room: element types, errors, environment variables, paths, and checks of single arguments."""
