"""The HTTP server; no engine logic."""
