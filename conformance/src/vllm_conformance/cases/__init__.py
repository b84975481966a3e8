"""What the levels test. Each module here that has a `collect` yields cases; `vllm_conformance.case` says what a case is.

`collect` imports no torch and touches no device, so a whole suite is planned in a moment; what runs in a child process is
in modules that are imported when the first case needs them. A case whose ``params`` hold ``"ci": True`` belongs to the fixed
subset that a continuous integration runs.
"""
