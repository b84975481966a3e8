"""Calls into Intel's own libraries; kernels come from vllm-triton."""
