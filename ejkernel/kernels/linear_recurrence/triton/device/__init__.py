"""Device code of the gated linear recurrence. Modules here import Triton; host code imports them when it launches."""
