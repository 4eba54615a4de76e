"""Streams a completion through vLLM's asynchronous engine, where that is installed."""

import asyncio
import sys

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncLLMEngine
from vllm.utils import random_uuid


async def stream(model):
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=model, max_model_len=128, disable_log_requests=True))
    async for output in engine.generate("Hello", SamplingParams(max_tokens=4), random_uuid()):
        print(output.outputs[0].text)


asyncio.run(stream(sys.argv[1] if len(sys.argv) > 1 else "facebook/opt-125m"))
