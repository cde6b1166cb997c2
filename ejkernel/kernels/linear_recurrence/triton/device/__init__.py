"""Device code of the gated linear recurrence. Modules here import Triton, and nobody imports them at its top."""
