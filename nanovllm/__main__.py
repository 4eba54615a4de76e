"""`python -m nanovllm run-batch …`, as the command `nanovllm`."""

import sys

from nanovllm.jobs.cli import main

sys.exit(main())
