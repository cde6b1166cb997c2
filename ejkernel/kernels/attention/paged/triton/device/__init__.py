"""Device code: imported when it is launched."""
