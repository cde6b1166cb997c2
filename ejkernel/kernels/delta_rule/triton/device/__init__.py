"""Device code of the delta rule. Modules here import Triton, and nobody imports them at its top."""
