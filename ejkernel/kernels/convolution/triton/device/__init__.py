"""Device code of the short convolution; imported when it is launched."""
