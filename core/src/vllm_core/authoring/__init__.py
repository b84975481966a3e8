"""For authors of hardware packages: a new distribution, a check of one without hardware, and what changed in the contract."""
