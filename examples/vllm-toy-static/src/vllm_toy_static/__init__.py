"""A remote device that runs compiled steps of fixed sizes alone, as a platform of vllm-core."""
