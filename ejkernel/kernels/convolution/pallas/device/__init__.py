"""Device code in Pallas, for TPUs."""
