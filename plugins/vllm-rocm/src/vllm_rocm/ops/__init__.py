"""Calls into AMD's own libraries; kernels come from vllm-triton."""
