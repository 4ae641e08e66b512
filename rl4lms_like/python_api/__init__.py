"""One class for a run in Python: what is given to it becomes the config that a YAML file would have."""
