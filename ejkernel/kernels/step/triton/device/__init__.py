"""Device code of a layer's step; imported when it is launched."""
