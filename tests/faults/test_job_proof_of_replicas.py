"""The proof of a job of several replicas."""

import json
from functools import partial
from pathlib import Path

import pytest

from nanovllm.jobs import JobOptions, VerifyOptions, verify
from nanovllm.jobs.job import Job
from nanovllm.jobs.start import make_llm
from nanovllm.replicas.replicas import Replicas

pytestmark = pytest.mark.long


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Q: What is {number} + {3 * number}?\nA:", "params": {"max_tokens": 6}} for number in range(24)]
    Path("in").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(output, make, **engine):
        engine = {"deterministic": True, "max_model_len": 128, **engine}
        options = JobOptions("in", output, "bundled", engine, {"temperature": 0.8}, preflight="off")
        return Job(options, make).run()

    return run


def test_one_and_two_replicas_give_the_same_files(job):
    job("one", make_llm)
    report = job("two", make_llm, data_parallel_size=2)
    assert report["rows"]["errors"] == 0
    for kind in ("", ".rows"):
        assert Path(f"one{kind}").read_bytes() == Path(f"two{kind}").read_bytes()
    one, two = (json.loads(Path(f"{name}.manifest").read_text()) for name in ("one", "two"))
    assert {name for name in one if one[name] != two[name]} == {"options", "checksum"}
    found = verify(VerifyOptions("two", sample=5))
    assert found["differences"] == [] and len(found["rows"]["equal"]) == 5


def test_replicas_with_different_weights_are_refused(job, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
    make_replicas = partial(Replicas, replica_module="support.replica_with_own_weights")
    with pytest.raises(RuntimeError, match="differs from the first replica that started, in its weights"):
        job("two", make_replicas, data_parallel_size=2)
    assert not Path("two").exists()
