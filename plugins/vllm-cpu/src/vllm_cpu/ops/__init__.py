"""Implementations of ops on the host."""
