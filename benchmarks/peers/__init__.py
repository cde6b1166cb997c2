"""The layers held against the code that people run today: `make peers`, which needs PyTorch, transformers and fla."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # fla's kernels need no GPU then; Triton looks when it is first imported
