"""Calls of Triton kernels."""
