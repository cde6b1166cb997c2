"""The cores: one folder an op, one file a platform."""
