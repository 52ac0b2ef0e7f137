"""`python -m metattt`: the command line, where the script `metattt` is not on the path."""

import sys

from metattt.cli import main

if __name__ == "__main__":
    sys.exit(main())
