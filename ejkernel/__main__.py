"""`python -m ejkernel`: the command `ejkernel`."""

import sys

from ejkernel.cli import main

if __name__ == "__main__":
    sys.exit(main())
