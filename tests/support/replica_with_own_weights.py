"""A replica that says that it has weights of its own, for Replicas' `replica_module`."""

import os

import nanovllm.replicas.worker
from nanovllm import LLM

if __name__ == "__main__":
    provenance = LLM.provenance
    LLM.provenance = lambda self: {**provenance(self), "weights": {"all": str(os.getpid()), "tensors": {}}}
    nanovllm.replicas.worker.main()
