"""The name of the backend in SGLang."""

NAME = "flashpage"
