"""Adapters to other projects' engines, one folder for each."""
