"""Device code that recurrences share. Modules here import Triton; host code imports them when it launches."""
