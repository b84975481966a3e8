"""Calls that are not in Triton."""
