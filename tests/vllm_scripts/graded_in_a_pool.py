"""Completes questions, and grades the completions in a process of a pool, which imports this file too."""

import argparse
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

from vllm import LLM, EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind


def grade(answer, args, kind):
    return answer.strip() == "432" and args.max_model_len == 256 and kind is RequestOutputKind.FINAL_ONLY


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    args = EngineArgs(model=parser.parse_args().model, max_model_len=256)
    llm = LLM.from_engine_args(args)
    sampling_params = SamplingParams(temperature=0, max_tokens=16)
    prompts = ["Q: What is 47 + 385?\nA:", "Q: What is 90 - 48?\nA:"]
    answers = [output.outputs[0].text for output in llm.generate(prompts, sampling_params)]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(grade, answer, args, RequestOutputKind.FINAL_ONLY) for answer in answers]
        print("grades:", *[job.result() for job in jobs])
    command = [sys.executable, "-c", "import vllm; print('version:', vllm.__version__)"]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")
