"""The systems that are compared: one module each, one process each, one protocol (`worker`)."""
