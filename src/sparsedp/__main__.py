"""`python -m sparsedp`, and so `torchrun ... -m sparsedp`: the `sparsedp` command."""

import sys

from sparsedp.cli.main import main

sys.exit(main())
