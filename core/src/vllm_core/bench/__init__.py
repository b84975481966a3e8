"""Measurements of the engine and of servers, and the gate between two of them; `bench/` at the top holds recorded runs."""
