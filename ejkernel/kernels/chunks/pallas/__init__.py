"""What the recurrences share on TPUs: how a call is tiled, how kernels are launched, and most device code."""
