"""Problems that the bundled model has never seen."""

import itertools

from nanovllm.demo.problems import problems

PROBLEMS = list(itertools.islice(problems(seed=1, held_out=True), 1000))
CONVERSATIONS = [[{"role": "user", "content": question}] for question, _ in PROBLEMS]
