"""`python -m yggdrasil`: the same as `ygg`."""

import sys

from yggdrasil.cli import main

if __name__ == "__main__":
    sys.exit(main())
