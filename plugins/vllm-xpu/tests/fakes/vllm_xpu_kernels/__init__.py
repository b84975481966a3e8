"""A stand-in for vllm-xpu-kernels: its schemas, with arithmetic of torch. A misreading of its semantics would pass here."""
