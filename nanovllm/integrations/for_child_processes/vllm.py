"""vLLM's name in a child process. `install` puts its module in place of this one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # if the parent process found nanovllm in its working directory

from nanovllm.integrations.vllm import install

install(replace=True)
