"""Proves what a platform of vllm-core claims, both ways."""
