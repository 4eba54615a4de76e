"""vLLM's name in a child process. `install` puts its module in place of this one."""

import sys
from pathlib import Path

# The parent process may have found nanovllm in its working directory.
sys.path.insert(0, str(Path(__file__).parents[3]))

from nanovllm.integrations.vllm import install

del sys.path[0]
install(replace=True)
