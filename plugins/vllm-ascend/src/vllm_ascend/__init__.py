"""Ascend NPUs as a platform of vllm-core."""
