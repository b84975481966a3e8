"""Ops as core calls them, on calls of torch_npu. Oracle of each: the reference of the same name."""
