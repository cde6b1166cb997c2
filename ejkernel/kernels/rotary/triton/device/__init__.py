"""Device code of a token's rotation; imported when it is launched."""
