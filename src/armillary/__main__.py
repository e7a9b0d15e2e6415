"""The process: what `armillary` and `python -m armillary` start.

Nothing is imported at the top, so that an interrupt in the middle of imports ends as any other.
"""

import sys


def run() -> int:
    """Run the process's command line and return its exit code."""
    try:
        from armillary.cli import main

        return main()
    except KeyboardInterrupt:
        print("armillary: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
