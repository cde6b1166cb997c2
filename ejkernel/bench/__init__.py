"""`ejkernel bench`: the ops against their peers on this machine, as text, JSON and pictures."""
