"""A run, as data: read from YAML, looked up, checked, told in full before anything is loaded."""
