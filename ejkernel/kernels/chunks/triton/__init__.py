"""What both recurrences share on NVIDIA GPUs: launches, packing tables, pools, and device code for tokens and gates."""
