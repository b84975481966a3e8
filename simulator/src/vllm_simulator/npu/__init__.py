"""The vendor's ops: schemas of the published wheel (`schemas.txt`), documented rules, and reference mathematics."""
