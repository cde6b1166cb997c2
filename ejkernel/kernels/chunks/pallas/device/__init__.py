"""Device code: what runs on a TPU. Imported when it is launched, since `import ejkernel` must not import Pallas."""
