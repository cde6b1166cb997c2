"""Device code of softmax attention. Modules here import Triton, and nobody imports them at its top."""
