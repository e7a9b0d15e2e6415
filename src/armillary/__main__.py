"""`python -m armillary`: the command line without its script."""

import sys

from armillary.cli import main

if __name__ == "__main__":
    sys.exit(main())
