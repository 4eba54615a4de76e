"""Kills jobs, and compares what they finish with in the end with an uninterrupted run: the output and the error rows of
the report.

    python tests/support/job_crashes.py counts             # twice, with a fake LLM; the counts of each run between
    python tests/support/job_crashes.py calls              # at each system call that changes a file, with a fake LLM
    python tests/support/job_crashes.py moments --kills 500 --rows 2000    # at random moments, with the bundled model

With --columns, the rows are data of which a column is the prompt, and the output repeats the others. With --tasks, most
rows of `calls` are computed in one forward pass. With --deterministic, the jobs of `calls` have a proof.
A killed run is a fork of this process, so that imports take time only once. Besides kills there are torn writes (the
file ends in the middle of a line, or in garbage) and full disks (a limit of the files' size).
"""

import argparse
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import nanovllm.jobs.job as job
import nanovllm.jobs.journal as journal
from nanovllm.demo import MODEL_DIRECTORY
from nanovllm.jobs.errors import JobError
from support.fake_llm import FakeLLM

CALLS = ("pwrite", "ftruncate", "fsync", "fdatasync", "replace", "unlink")
WORDS = ["kernel", "garden", "paged", "memory", "planet", "token", "cache", "block"]


def rows_of(count: int) -> list[dict]:
    """Questions that the bundled model answers, sampled and greedy, some with several completions, and bad rows."""
    rng = random.Random(1)
    rows: list[dict] = []
    for number in range(count):
        kind, row = rng.random(), {"id": f"row {number}"}
        question = f"What is {rng.randrange(999)} + {rng.randrange(999)}?"
        if kind < 0.5:
            row["prompt"] = f"Q: {question}\nA:"
        elif kind < 0.9:
            row["messages"] = [{"role": "user", "content": f"Reverse the word {rng.choice(WORDS)}."}]
        else:
            row["prompt"] = 5
        row["params"] = {"max_tokens": rng.choice([1, 8, 30]), "temperature": rng.choice([0, 0.8])}
        if row["params"]["temperature"] and rng.random() < 0.2:
            row["params"]["n"] = 3
        rows.append(row)
    return rows


def rows_with_tasks(count: int) -> list[dict]:
    """Rows with tasks, and some that generate text."""
    texts = [f"text {number}" for number in range(count)]
    return [
        [
            {"id": text, "task": "embed", "prompt": text},
            {"custom_id": text, "url": "/v1/embeddings", "body": {"input": text, "dimensions": 16}},
            {"id": text, "task": "label", "prompt": text, "labels": ["a", "b"]},
            {"id": text, "task": "score", "query": text, "document": "a text"},
            {"id": text, "task": "embed", "prompt": 5},
            {"id": text, "prompt": text},
        ][number % 6]
        for number, text in enumerate(texts)
    ]


def write_input(path: Path, rows: list[dict], columns: dict[str, str]) -> None:
    if columns:
        prompts = [row["prompt"] if "prompt" in row else row["messages"][0]["content"] for row in rows]
        rows = [{"question": prompt, "label": number} for number, prompt in enumerate(prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(options: job.JobOptions, llm_class: type) -> None:
    job.Job(options, llm_class).run()


def errors_of(path: Path) -> tuple[int, list[dict]]:
    """The error rows in the report of a finished job, and their kinds."""
    report = json.loads(path.with_name(path.name + ".job").read_text())["report"]
    return report["rows"]["errors"], report["errors"]


def in_fork(work) -> int:
    """Runs `work` in a fork. Returns its exit status, negative if a signal ended it."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            work()
            status = 0
        except JobError as error:
            print(f"  {error}"[:150], file=sys.stderr)
            status = 3
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def dying_at(call: int, halves: bool, work) -> None:
    """Runs `work`, and dies before its system call number `call`, or in the middle of it if it is a write."""
    counted = 0

    def patched(name, real):
        def replacement(*arguments):
            nonlocal counted
            counted += 1
            if counted == call:
                if name == "pwrite" and halves:
                    fd, data, offset = arguments
                    real(fd, bytes(data)[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return replacement

    for name in CALLS:
        setattr(os, name, patched(name, getattr(os, name)))
    work()


def kill_at_each_call(rows: list[dict], columns: dict[str, str], is_deterministic: bool) -> None:
    """Each call in turn is the last one of a run; the next run is killed at another; then one finishes."""
    preflight = job.Preflight(str(MODEL_DIRECTORY))
    job.Preflight = lambda *arguments, **options: preflight  # its tokenizer takes most of a run's time
    journal._SECONDS_BETWEEN_WRITES = 0.0
    # The bytes that a call wrote outlive its process. A real sync only protects from a loss of power, and is slow.
    os.fsync = os.fdatasync = lambda file: None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_input(directory / "in", rows, columns)

        def options(output: str) -> job.JobOptions:
            return job.JobOptions(
                str(directory / "in"), str(directory / output), str(MODEL_DIRECTORY),
                {"deterministic": is_deterministic}, preflight="off", seconds_between_syncs=0.0, **columns,
            )  # fmt: skip

        proof = [".manifest", ".rows"] if is_deterministic else []

        def proof_of(output: str) -> list[bytes]:
            return [(directory / f"{output}{kind}").read_bytes() for kind in proof]

        run(options("whole"), FakeLLM)
        expected, errors = (directory / "whole").read_bytes(), errors_of(directory / "whole")
        assert len(expected.splitlines()) == len(rows)
        num_kills, call, rng = 0, 0, random.Random(0)
        while True:
            call += 1
            before = num_kills
            for halves in (False, True):
                for last in (call, rng.randrange(1, 40)):
                    work = partial(dying_at, last, halves, partial(run, options("out"), FakeLLM))
                    num_kills += in_fork(work) < 0
                assert in_fork(lambda: run(options("out"), FakeLLM)) == 0
                assert (directory / "out").read_bytes() == expected, f"killed at call {call}"
                assert errors_of(directory / "out") == errors, f"killed at call {call}"
                assert proof_of("out") == proof_of("whole"), f"killed at call {call}"
                left = sorted(path.name for path in directory.iterdir() if path.name.startswith("out"))
                assert left == sorted(f"out{kind}" for kind in ["", ".job", *proof]), left
                for kind in ("", ".job", *proof):
                    (directory / f"out{kind}").unlink()
            if num_kills == before or call > 500:
                break
    assert num_kills > 3 * len(rows) and call < 500, (
        "the calls that change files are others than those that are patched"
    )
    print(f"right: {num_kills} kills at {call - 1} calls")


class Erring(FakeLLM):
    """Refuses rows with a 7. Sends this process a signal when it has completed some rows."""

    after, signal = -1, signal.SIGKILL
    made: list[str] = []

    def complete(self, number, prompt, params):
        if len(self.made) == self.after:
            os.kill(os.getpid(), self.signal)
        output = super().complete(number, prompt, params)
        return replace(output, error=f"{prompt!r:.20} has a 7") if "7" in output.prompt else output


def count_error_rows_at_each_point(count: int) -> None:
    """SIGKILL ends the first run and the third; Ctrl-C ends the second and the fourth, which report what there is."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_input(directory / "in", rows_of(count), {})

        def options(output: str) -> job.JobOptions:
            paths = [str(directory / each) for each in ("in", output, "report")]
            return job.JobOptions(*paths[:2], str(MODEL_DIRECTORY), seconds_between_syncs=0.0, report=Path(paths[2]))

        run(options("whole"), Erring)
        Erring.made.clear()
        whole = errors_of(directory / "whole")
        assert whole[0] == sum(json.loads(row)["error"] is not None for row in (directory / "whole").open()) > 3
        found = [0]
        for kind in (signal.SIGKILL, signal.SIGINT, signal.SIGKILL, signal.SIGINT):
            Erring.after, Erring.signal = count // 8, kind
            status = in_fork(lambda: run(options("out"), Erring))
            assert status == (-kind if kind == signal.SIGKILL else 0)
            rows = [line.split(b" ", 2)[2] for line in (directory / "out.part").read_bytes().splitlines()]
            errors = sum(json.loads(row.removeprefix(b"!"))["error"] is not None for row in rows)
            if kind == signal.SIGINT:
                report = json.loads((directory / "report").read_text())
                assert report["rows"]["errors"] == errors == sum(each["rows"] for each in report["errors"])
                assert report["rows"]["finished"] == len(rows) < count
            found.append(errors)
        assert found == sorted(found) and 0 < found[1] < found[-1] < whole[0], f"errors at each end: {found}, {whole}"
        Erring.after = -1
        run(options("out"), Erring)
        assert errors_of(directory / "out") == whole
        assert (directory / "out").read_bytes() == (directory / "whole").read_bytes()
    print(f"right: {found} error rows at each end, {whole[0]} in all")


def wait_for_growth(path: Path, process: int) -> None:
    """Waits until the file has grown, or the process has ended (it stays a zombie)."""
    before = path.stat().st_size if path.exists() else 0
    while not path.exists() or path.stat().st_size <= before:
        if os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.01)


def kill_at_random_moments(num_kills: int, count: int, model: str, seconds: float, columns: dict[str, str]) -> None:
    import torch  # noqa: F401 - before the forks
    import transformers  # noqa: F401

    import nanovllm.runner.model_runner  # noqa: F401
    from nanovllm import LLM

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_input(directory / "in", rows_of(count), columns)

        def options(output: str) -> job.JobOptions:
            # A small batch, so that a run is long enough to be killed often.
            engine = {"max_num_seqs": 32, "max_model_len": 256}
            return job.JobOptions(
                str(directory / "in"),
                str(directory / output),
                model,
                engine,
                preflight="off",
                seconds_between_syncs=0.5,
                **columns,
            )

        began = time.monotonic()
        assert in_fork(lambda: run(options("whole"), LLM)) == 0
        whole_seconds = time.monotonic() - began
        expected, errors = (directory / "whole").read_bytes(), errors_of(directory / "whole")
        assert len(expected.splitlines()) == count
        done = torn = full = finished = cut = 0
        while done < num_kills:
            process = os.fork()
            if process == 0:
                if rng.random() < 0.1 and (directory / "out.part").exists():
                    size = (directory / "out.part").stat().st_size + rng.randrange(1, 5000)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                status = 1
                try:
                    run(options("out"), LLM)
                    status = 0
                except JobError:
                    status = 3
                finally:
                    os._exit(status)
            rng.random()  # the fork drew it
            rng.randrange(1, 5000)
            if done % 2:  # at any moment, or soon after a row was written
                time.sleep(rng.uniform(0.2, seconds))
            else:
                wait_for_growth(directory / "out.part", process)
                time.sleep(rng.uniform(0, 0.2))
            os.kill(process, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert status in (0, 3, -signal.SIGKILL), status
            done += 1
            full += status == 3
            part = directory / "out.part"
            cut += part.exists() and part.stat().st_size > 0
            # Once the output exists, the whole journal has been synced, and no kill can tear it.
            if status < 0 and part.exists() and not (directory / "out").exists() and rng.random() < 0.3:
                torn += 1
                with part.open("r+b") as file:
                    size = part.stat().st_size
                    file.truncate(max(0, size - rng.randrange(200)))
                    file.seek(0, os.SEEK_END)
                    file.write(rng.randbytes(rng.randrange(100)))
            if status == 0:
                finished += 1
                assert (directory / "out").read_bytes() == expected and errors_of(directory / "out") == errors
                for suffix in ("", ".job"):
                    (directory / f"out{suffix}").unlink()
        assert in_fork(lambda: run(options("out"), LLM)) == 0
        assert (directory / "out").read_bytes() == expected
    assert cut, "every kill came before the first row was written, or after the last; change --seconds or --rows"
    print(
        f"right: {done} kills, {cut} of them after some rows, {torn} torn files and {full} full disks among "
        f"them, {finished + 1} finished jobs of "
        f"{count} rows, {whole_seconds:.1f} s uninterrupted"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("counts", "calls", "moments"))
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--model", default=str(MODEL_DIRECTORY))
    parser.add_argument("--seconds", type=float, default=3.0, help="most seconds until a run is killed")
    parser.add_argument("--columns", action="store_true")
    parser.add_argument("--tasks", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    given = parser.parse_args()
    columns = {"prompt_column": "question"} if given.columns else {}
    gc.freeze()  # else each fork copies the libraries' pages, which its collector writes to
    if given.kind == "counts":
        count_error_rows_at_each_point(min(given.rows, 200))
    elif given.kind == "calls":
        rows = rows_with_tasks if given.tasks else rows_of
        kill_at_each_call(rows(min(given.rows, 20)), columns, given.deterministic)
    else:
        kill_at_random_moments(given.kills, given.rows, given.model, given.seconds, columns)


if __name__ == "__main__":
    main()
