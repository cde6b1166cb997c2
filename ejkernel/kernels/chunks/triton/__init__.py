"""What recurrences share on NVIDIA GPUs: packing tables, places of tokens, gates and their exact path."""
