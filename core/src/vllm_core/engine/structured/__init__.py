"""Constrained decoding: grammars, the masks of a step, and what JSON schemas may ask."""
