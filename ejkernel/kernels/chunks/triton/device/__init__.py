"""Device code that recurrences share. Modules here import Triton, and nobody imports them at its top."""
