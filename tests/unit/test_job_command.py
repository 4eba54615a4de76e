"""The command `nanovllm`: its exit statuses, its help, and one line for each mistake."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature

import pytest

from nanovllm import LLM, Config, SamplingParams, __version__
from nanovllm.jobs import JobError, cli
from nanovllm.jobs.arguments import meanings_of
from nanovllm.jobs.cli import main
from nanovllm.jobs.options import JobOptions

GOOD = {"id": "good", "prompt": "Q: What is 1 + 2?\nA:", "params": {"max_tokens": 1}}
BAD = {"id": "bad", "prompt": 5}
TOO_LONG = {"id": "long", "prompt": "a b c d " * 50, "params": {"max_tokens": 1}}  # for a cache of 2 blocks
COMMAND = ["run-batch", "-i", "in", "-o", "out", "--model", "bundled"]


def shell(words: str, directory, **environment) -> subprocess.Popen:
    """Starts a command line; $NANOVLLM is the command, with the input `in`."""
    words = words.replace("$NANOVLLM", f"{sys.executable} -m nanovllm")
    return subprocess.Popen(
        words, shell=True, cwd=directory, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def write_rows(path, *rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def refusal(words, capsys) -> str:
    """The one line of a command that argparse refuses."""
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture
def slow_import(tmp_path):
    """The environment of a command whose user presses Ctrl-C while numpy is imported, and again at the exit."""

    def with_code(again: str) -> dict[str, str]:
        (tmp_path / "lib").mkdir()
        press = "import atexit, os, signal\npress = lambda: os.kill(os.getpid(), signal.SIGINT)\n"
        (tmp_path / "lib" / "numpy.py").write_text(f"{press}{again}press()\n")
        return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "lib"), *filter(None, sys.path)])}

    return with_code


def test_the_exit_status_says_how_the_rows_went(tmp_path):
    """A job whose rows were all error rows once ended with 0, and "finished"."""
    rows = {0: [GOOD], 3: [GOOD, BAD], 4: [TOO_LONG, BAD], 1: []}
    running = {}
    for status, given in rows.items():
        if given:
            write_rows(tmp_path / f"in{status}", *given)
        words = f"$NANOVLLM run-batch -i in{status} -o out{status} --model bundled --num-kvcache-blocks 2"
        # Without standard error, too: the progress once asked it whether it is a terminal.
        running[status] = shell(words + " 2>&-" * (status == 0), tmp_path)
    said = {status: process.communicate()[1] for status, process in running.items()}
    assert {status: process.returncode for status, process in running.items()} == {each: each for each in rows}, said
    assert "there is no file 'in1'" in said[1] and len(said[1].splitlines()) == 1
    assert "error rows: 1 of 2" in said[3] and "error rows: 2 of 2" in said[4] and said[0] == ""
    begun = next(line for line in said[3].splitlines() if "run-batch: 0 of 2 rows" in line)
    assert re.match(r"\d\d:\d\d:\d\d ", begun)
    assert sorted(path.name for path in tmp_path.glob("out*")) == sorted(
        name for each in (0, 3, 4) for name in (f"out{each}", f"out{each}.job")
    )


@pytest.mark.parametrize("start", ["$NANOVLLM", f"{sys.executable} -c 'import nanovllm.__main__ as m; exit(m.main())'"])
def test_ctrl_c_during_the_imports_is_one_line(tmp_path, slow_import, start):
    """It was a traceback of the module that was being imported."""
    command = shell(f"{start} run-batch -i in -o out --model bundled", tmp_path, **slow_import(""))
    assert command.communicate()[1] == "nanovllm: stopped\n" and command.returncode == 130


def test_a_second_ctrl_c_shows_no_traceback_either(tmp_path, slow_import):
    words = "$NANOVLLM run-batch -i in -o out --model bundled; exit $?"
    command = shell(words, tmp_path, **slow_import("atexit.register(press)\n"))
    assert command.communicate()[1] == "nanovllm: stopped\n" and command.returncode == 130


@pytest.mark.parametrize(("trap", "status"), [("trap '' INT; ", 0), ("", 130)])
def test_ctrl_c_for_another_job_of_a_shell_is_ignored(trap, status):
    """A shell that is no terminal's starts background jobs so that they ignore SIGINT."""
    code = (
        "import signal, sys, nanovllm.jobs.cli as c, nanovllm.__main__ as m\n"
        "c.main = lambda: signal.raise_signal(signal.SIGINT) or 0\n"
        "sys.exit(m.main())"
    )
    assert subprocess.run(["sh", "-c", f"{trap}exec {sys.executable} -c '{code}'"]).returncode == status


@pytest.mark.parametrize("name", ["stdin", "stdout"])
def test_a_closed_stream_is_refused_before_anything_is_loaded(tmp_path, monkeypatch, capsys, name):
    """It was an AttributeError of None, with standard output when all rows had run."""
    write_rows(tmp_path / "in", GOOD)
    monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr("nanovllm.jobs.job.Preflight", None)
    paths = ["-", str(tmp_path / "out")] if name == "stdin" else [str(tmp_path / "in"), "-"]
    assert main(["run-batch", "-i", paths[0], "-o", paths[1], "--model", "bundled"]) == 1
    kind = {"stdin": "input", "stdout": "output"}[name]
    assert f'"-" is standard {kind}, which is closed; open it, or name a file\n' in capsys.readouterr().err


def test_files_never_take_the_numbers_of_closed_streams(tmp_path):
    """Libraries would write their messages into them."""
    program = (
        "import os, nanovllm.__main__ as m; m._open_closed_streams()\n"
        "assert os.open('file', os.O_RDWR | os.O_CREAT) > 2; print('x', file=__import__('sys').stderr)"
    )
    process = shell(f'{sys.executable} -c "{program}" <&- >&- 2>&-', tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    process.communicate()
    assert process.returncode == 0 and (tmp_path / "file").read_bytes() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(tmp_path):
    """It was "[Errno 28] No space left on device", without a word about what was full."""
    program = (
        "import sys, nanovllm.__main__ as m, nanovllm.jobs.cli as c; from nanovllm.jobs.results import Stdout\n"
        "c.run_batch = lambda options: Stdout().append(0, b'row'); sys.exit(m.main())"
    )
    (tmp_path / "run.py").write_text(program)
    words = f"{sys.executable} run.py {' '.join(COMMAND[:4])} - --model bundled >/dev/full"
    process = shell(words, tmp_path, PYTHONPATH=os.pathsep.join(sys.path))
    assert process.communicate()[1] == (
        "nanovllm run-batch: standard output cannot be written: No space left on device. Run the job again\n"
    )
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--max-token 5", "unknown option --max-token; did you mean --max-tokens?"),
        ("--max-new-tokens=5", "unknown option --max-new-tokens; did you mean --max-tokens?"),
        ("--restrat", "unknown option --restrat; did you mean --restart?"),
        ("--xyzzy", "unknown option --xyzzy; --help lists all options"),
        ("more", "unexpected argument more; --help lists all options"),
        ("--temperature hot", "--temperature must be a number, not 'hot'"),
        ("--max-num-seqs 1.5", "--max-num-seqs must be an integer, not '1.5'"),
        ("--params {", "--params must be an object such as {\"temperature\": 0.7}, not '{'"),
        ("--params [1]", "--params must be an object such as {\"temperature\": 0.7}, not '[1]'"),
        ("--pooler-config x", '--pooler-config must be an object such as {"pooling_type": "MEAN"}, not \'x\''),
        ("--labels yes", """unknown option --labels; labels are parameters: --params '{"labels": ["yes", "no"]}'"""),
        ("--on-error skip", "--on-error: invalid choice: 'skip' (choose from"),
        ("--seed", "--seed: expected one argument"),
    ],
)
def test_a_wrong_command_is_one_line(capsys, words, line):
    """It was a hundred lines of usage. Abbreviations of options were taken."""
    assert refusal([*COMMAND, *words.split()], capsys).startswith(f"nanovllm run-batch: {line}")


def test_json_that_is_nested_too_deeply_is_one_short_line(capsys):
    """It was a RecursionError."""
    assert len(refusal([*COMMAND, "--params", "[" * 100_000], capsys)) < 250


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["run"], "nanovllm: COMMAND: invalid choice: 'run'"),
        (["--versoin"], "nanovllm: the following arguments are required: COMMAND"),
        (["run-batch"], "nanovllm: run-batch needs --input, --output, --model; run-batch --help lists all options"),
        (["run-batch", "--outptu", "x"], "nanovllm run-batch: unknown option --outptu; did you mean --output?"),
    ],
)
def test_a_command_without_what_it_needs_is_one_line(capsys, words, line):
    assert refusal(words, capsys).startswith(line)


@pytest.mark.parametrize("words", [["--temperature", "-1"], ["--max-num-seqs", "0"]])
def test_a_value_that_is_refused_later_is_one_line_too(tmp_path, capsys, words):
    write_rows(tmp_path / "in", GOOD)
    command = ["run-batch", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "bundled"]
    assert main([*command, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanovllm run-batch: ") and words[1] in line


def test_help_has_meaning_and_default_of_each_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["run-batch", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    options = [name for name in signature(LLM.__init__).parameters if name not in ("self", "model", "queue_calls")]
    options += [field.name for field in fields(JobOptions) if field.name not in ("engine", "seconds_between_syncs")]
    options[options.index("adapters")] = "adapter"  # each time, one
    lists = {"stop_token_ids", "logit_bias", "allowed_token_ids", "structured_outputs", "logits_processors"}
    options += {*signature(SamplingParams.__init__).parameters} - lists - {"self", "logprobs_mode"}
    assert [name for name in options if f"--{name.replace('_', '-')}" not in text] == []
    for said in (
        "--top-k NUMBER sample among the k most probable tokens; 0 or -1 is off. Default: 0.",
        "--overlap, --no-overlap let the device run one step ahead of the host. Default: on.",
        "--sync-seconds NUMBER seconds between syncs to the disk; after a power failure, rows that finished after the "
        "last sync run again. Default: 10.0.",
        '{"pooling_type": "MEAN", "normalize": false}',
        "--truncate-prompt-tokens NUMBER keep at most this many tokens of a prompt: the first ones, unless the "
        'tokenizer\'s truncation_side is "left". -1 is as many',
        """Labels: --params '{"labels": ["yes", "no"]}'""",
        "--max-num-seqs NUMBER maximum number of sequences that run at a time; None is 1,024 on a GPU",
        "3 some rows are error rows 4 all rows are error rows 130 a signal stopped it",
    ):
        assert said in text
    assert "−" not in text and ": False" not in text


@pytest.mark.parametrize("documented", [JobOptions, Config, SamplingParams])
def test_each_argument_has_a_meaning(documented):
    names = {*signature(documented.__init__).parameters} - {"self"}
    assert all(len(meanings_of(documented).get(name, "")) > 10 for name in names)
    assert not any(":" in name or "Raises" in text for name, text in meanings_of(documented).items())


def test_the_exit_statuses_of_the_help_are_those_of_the_code():
    assert [int(each) for each in re.findall(r"^ +(\d+)  ", cli._run_batch.__doc__, re.MULTILINE)] == list(cli.Exit)


def test_the_command_alone_and_its_version(capsys):
    assert main([]) == 2
    assert "run-batch" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"nanovllm {__version__}\n"


def test_help_and_wrong_commands_import_no_torch():
    """They took the seconds that its import takes."""
    program = "import sys, nanovllm.jobs.cli; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("error", "status"), [(JobError("x"), 1), (ImportError("x"), 1), (OSError("x"), 1), (KeyboardInterrupt(), 130)]
)
def test_what_ends_a_job_is_one_line(monkeypatch, capsys, error, status):
    def fails(options):
        raise error

    monkeypatch.setattr(cli, "run_batch", fails)
    assert main(COMMAND) == status
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("rows", "is_dry", "status"),
    [
        ((5, 5, 0), False, 0), ((0, 0, 0), False, 0), ((5, 5, 2), False, 3), ((5, 5, 5), False, 4),
        ((5, 4, 4), False, 130), ((5, 0, 0), True, 0), ((5, 0, 1), True, 3), ((5, 0, 5), True, 4),
    ],
)  # fmt: skip
def test_the_exit_status_follows_from_the_report(monkeypatch, rows, is_dry, status):
    report = {"rows": dict(zip(("total", "finished", "errors"), rows, strict=True))}
    monkeypatch.setattr(cli, "run_batch", lambda options: report)
    assert main([*COMMAND, *["--dry-run"] * is_dry]) == status


@pytest.mark.parametrize(("num_prompts", "num_errors", "status"), [(10, 10, 4), (10, 9, 3), (0, 0, 3)])
def test_a_dry_run_of_a_sample_counts_the_rows_that_it_checked(monkeypatch, num_prompts, num_errors, status):
    preflight = {"num_prompts": num_prompts, "num_errors": num_errors}
    report = {"rows": {"total": 100, "finished": 0, "errors": 10}, "preflight": preflight}
    monkeypatch.setattr(cli, "run_batch", lambda options: report)
    assert main([*COMMAND, "--dry-run", "--preflight", "sample"]) == status
