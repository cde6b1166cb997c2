"""The layers held against the code that people run today: `make peers`, which needs PyTorch, transformers and fla."""
