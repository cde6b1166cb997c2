"""Device code of a gated norm; imported when it is launched."""
