"""`python -m flashpage`: the console command."""

import sys

from .cli import main

sys.exit(main())
