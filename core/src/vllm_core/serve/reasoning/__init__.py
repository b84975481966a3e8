"""Reasoning: what a model thinks before it answers, told apart from the answer."""
