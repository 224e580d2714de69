"""`python -m frame`: the same as the command `frame`."""

import sys

from frame.core.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
