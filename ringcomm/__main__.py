"""`python -m ringcomm`, the same as the command `ringcomm`."""

import sys

from ringcomm.commands.cli import main

sys.exit(main())
