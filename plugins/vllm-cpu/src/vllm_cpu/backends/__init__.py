"""Offers of ops, by architecture family."""
