"""The journal of a job: appended rows are read again after any kill, torn write or full disk."""

import fcntl
import json
import os
import random
import subprocess
import sys
import threading

import pytest

from nanovllm.jobs.errors import JobError
from nanovllm.jobs.journal import Journal

ROWS = [b"", b"{}", b'{"id": "a", "text": "12 00000000 x"}', "ü → \u2028".encode(), b"x" * 300_000]


def appended(path, rows=ROWS, order=(3, 0, 4, 1, 2)) -> bytes:
    journal = Journal(path)
    journal.recover(len(rows))
    for number in order:
        journal.append(number, rows[number])
    journal.close()
    return path.read_bytes()


def recovered(path, num_rows=5) -> dict[int, bytes]:
    journal = Journal(path)
    journal.recover(num_rows)
    numbers = [number for number in range(num_rows) if number in journal]
    found = dict(zip(numbers, journal.rows(), strict=True))
    assert journal.num_rows == len(found)
    journal.close()
    return found


def test_rows_come_back_in_the_inputs_order(tmp_path):
    appended(tmp_path / "part")
    assert recovered(tmp_path / "part") == dict(enumerate(ROWS))


def test_a_file_cut_anywhere_keeps_exactly_the_whole_lines(tmp_path):
    rows = [row[:50] for row in ROWS]
    whole, order = appended(tmp_path / "part", rows), (3, 0, 4, 1, 2)
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        (tmp_path / "cut").write_bytes(whole[:size])
        expected = [order[index] for index, end in enumerate(ends) if end <= size]
        assert sorted(recovered(tmp_path / "cut")) == sorted(expected)
        kept = (tmp_path / "cut").read_bytes() if (tmp_path / "cut").exists() else b""  # an empty one is removed
        assert kept == whole[: max([0, *(end for end in ends if end <= size)])]


def test_a_torn_end_that_holds_anything_is_cut_off_and_work_goes_on(tmp_path):
    """After a power failure, a file may have its new size and zeros, or another file's old bytes, as its end."""
    rng = random.Random(0)
    rows = [b"row %d" % number for number in range(9)]
    for garbage in (
        bytes(5000),
        b"\n",
        b"3 00000000 row 3\n",
        b"3",
        rng.randbytes(5000),
        b"99 12345678 x\n",
        b"\xff\n",
    ):
        whole = appended(tmp_path / "part", rows, order=(5, 1, 7))
        (tmp_path / "part").write_bytes(whole + garbage)
        journal = Journal(tmp_path / "part")
        journal.recover(9)
        assert [number for number in range(9) if number in journal] == [1, 5, 7]
        for number in (0, 2, 3, 4, 6, 8):
            journal.append(number, rows[number])
        assert list(journal.rows()) == rows
        journal.close()
        assert recovered(tmp_path / "part", 9) == dict(enumerate(rows))
        (tmp_path / "part").unlink()


def test_one_changed_bit_drops_its_line_and_what_follows(tmp_path):
    rows = [b"row %d" % number for number in range(5)]
    whole = appended(tmp_path / "part", rows, order=range(5))
    for place in range(whole.index(b"\n") + 1, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1
        (tmp_path / "part").write_bytes(changed)
        line = whole[:place].count(b"\n")
        assert sorted(recovered(tmp_path / "part", 5)) == list(range(line)), place


def test_a_full_disk_leaves_whole_lines_and_says_what_to_do(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "part")
    journal.recover(3)
    journal.append(0, b"first")
    journal.write()
    before = (tmp_path / "part").read_bytes()
    real = os.pwrite
    room = 9

    def full(fd, data, offset):
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = real(fd, bytes(data)[:room], offset)
        room -= written
        return written

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(JobError, match=r"cannot be written: No space left on device\. Make room and run the same comm"):
        journal.append(1, b"x" * 200_000)
    monkeypatch.undo()
    assert (tmp_path / "part").read_bytes() == before
    with pytest.raises(JobError, match="No space left"):
        journal.close()
    assert recovered(tmp_path / "part", 3) == {0: b"first"}


def test_a_slow_disk_stops_nobody(tmp_path, monkeypatch):
    """During a sync, which is on another thread, rows are still appended and written."""
    began, may_end, threads = threading.Event(), threading.Event(), []

    def slow(fd: int) -> None:
        threads.append(threading.current_thread())
        began.set()
        assert may_end.wait(60)

    monkeypatch.setattr(os, "fdatasync", slow)
    journal = Journal(tmp_path / "part", seconds_between_syncs=0.01)
    journal.recover(5)
    journal.append(0, ROWS[1])
    assert began.wait(60)
    for number in range(1, 5):
        journal.append(number, b"x" * 200_000)  # more than one write
    assert list(journal.rows()) == [ROWS[1]] + 4 * [b"x" * 200_000]
    assert threading.main_thread() not in threads
    may_end.set()
    journal.close()


def test_without_an_interval_every_row_is_synced_when_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.append(os.fstat(fd).st_size))
    journal = Journal(tmp_path / "part", seconds_between_syncs=0)
    journal.recover(5)
    for number in range(4):
        journal.append(number, ROWS[number])
        assert synced[-1] == (tmp_path / "part").stat().st_size > 0
    journal.close()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("none left")])
def test_whatever_fails_in_the_thread_is_raised_by_a_later_append(tmp_path, monkeypatch, error):
    def fails(fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fdatasync", fails)
    journal = Journal(tmp_path / "part", seconds_between_syncs=0.01)
    journal.recover(5)
    journal.append(0, ROWS[1])
    journal._thread.join(60)
    for last in (lambda: journal.append(1, ROWS[4]), journal.close):
        with pytest.raises(JobError, match="part"):
            last()


@pytest.mark.parametrize("name", ["fdatasync", "pwrite"])
def test_what_fails_in_the_thread_after_the_last_row_is_raised_at_the_end(tmp_path, monkeypatch, name):
    """A job that was stopped once ended without a word about rows that had not reached the disk."""

    def fails(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path / "part", seconds_between_syncs=0.01)
    journal.recover(5)
    monkeypatch.setattr(os, name, fails)
    journal.append(0, ROWS[1])
    journal._thread.join(60)
    with pytest.raises(JobError, match="Input/output error"):
        journal.close()
    journal.close()
    monkeypatch.undo()
    Journal(tmp_path / "part").close()  # no process holds the lock any more


def test_a_failure_never_hides_another_exception_and_is_never_hidden_by_one(tmp_path, monkeypatch, caplog):
    """A failed sync once replaced the engine's error. And if Ctrl-C came after it, the failure was silent."""

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with pytest.raises(ZeroDivisionError), Journal(tmp_path / "part", seconds_between_syncs=0.01) as journal:
        journal.recover(5)
        monkeypatch.setattr(os, "fdatasync", fails)
        journal.append(0, ROWS[1])
        journal._thread.join(60)
        raise ZeroDivisionError
    assert "part cannot be synced: Input/output error" in caplog.text
    caplog.clear()
    with pytest.raises(JobError, match="cannot be synced"), Journal(tmp_path / "part", 0) as journal:
        journal.recover(5)
        journal.append(0, ROWS[1])
    assert not caplog.records, "it is raised already"
    with pytest.raises(KeyboardInterrupt), Journal(tmp_path / "part", 0) as journal:
        journal.recover(5)
        try:
            journal.append(0, ROWS[1])
        except JobError:
            monkeypatch.undo()  # a second sync would succeed
            raise KeyboardInterrupt from None
    assert "cannot be synced" in caplog.text


def test_a_disk_that_is_full_and_broken_is_called_full(tmp_path, monkeypatch):
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    def broken(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path / "part", seconds_between_syncs=0)
    journal.recover(3)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "ftruncate", broken)
    with pytest.raises(JobError, match=r"part cannot be written: No space left on device\. Make room and run"):
        journal.append(0, ROWS[1])
    monkeypatch.undo()
    with pytest.raises(JobError, match="No space left"):
        journal.close()


@pytest.mark.parametrize(
    "name, call", [("ftruncate", "clear"), ("ftruncate", "recover"), ("fsync", "recover")], ids=str
)
def test_a_disk_that_fails_at_the_start_is_named_with_its_file(tmp_path, monkeypatch, name, call):
    """Such an error was once "[Errno 5] Input/output error", without a file."""

    def fails(*arguments: object) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path / "part")
    with monkeypatch.context() as patch, pytest.raises(JobError, match=r"part cannot be .*: Input/output error"):
        patch.setattr(os, name, fails)
        journal.clear() if call == "clear" else journal.recover(3)
    journal.close()


def test_what_failed_does_not_matter_when_the_journal_is_removed(tmp_path, monkeypatch):
    """A job whose output was complete once ended with an error about the journal that it had just removed."""

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    journal = Journal(tmp_path / "part", seconds_between_syncs=0.01)
    journal.recover(1)
    journal.append(0, ROWS[1])
    assert list(journal.rows()) == [ROWS[1]]
    monkeypatch.setattr(os, "fdatasync", fails)
    journal._thread.join(60)
    journal.remove()
    journal.close()
    assert not (tmp_path / "part").exists()


def test_only_its_own_file_is_removed(tmp_path):
    """A run that removed its journal removed, at its end, that of another process which had begun."""
    first = Journal(tmp_path / "part")
    first.recover(1)
    first.remove()
    with Journal(tmp_path / "part") as second:
        second.recover(1)
        first.remove()
        first.close()
        assert (tmp_path / "part").exists()
        with pytest.raises(JobError, match="another process"):
            Journal(tmp_path / "part")


def test_ctrl_c_during_the_last_sync_leaves_no_lock(tmp_path, monkeypatch):
    began, may_end = threading.Event(), threading.Event()

    def slow(fd: int) -> None:
        began.set()
        assert may_end.wait(60)

    def interrupted(timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    journal = Journal(tmp_path / "part", seconds_between_syncs=0.01)
    journal.recover(1)
    monkeypatch.setattr(os, "fdatasync", slow)
    journal.append(0, ROWS[1])
    assert began.wait(60)
    thread = journal._thread
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(thread, "join", interrupted)
        journal.close()
    monkeypatch.undo()
    may_end.set()
    thread.join(60)
    assert not thread.is_alive()
    assert recovered(tmp_path / "part", 1) == {0: ROWS[1]}


def test_the_thread_wakes_as_often_as_the_interval_asks(tmp_path, monkeypatch):
    waits, wait = [], threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        waits.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", noted)
    for interval, expected in ((0.0, 0.2), (0.03, 0.03), (0.2, 0.2), (10.0, 0.2)):
        waits.clear()
        journal = Journal(tmp_path / "part", interval)
        journal.recover(1)
        journal.close()
        assert {timeout for timeout in waits if timeout is not None} == {expected}


def test_two_processes_never_write_one_journal(tmp_path):
    journal = Journal(tmp_path / "part")
    with pytest.raises(JobError, match="another process is writing"):
        Journal(tmp_path / "part")
    program = (
        "import sys; from pathlib import Path; from nanovllm.jobs.journal import Journal\n"
        "for _ in range(2):\n"
        "    try: Journal(Path(sys.argv[1]))\n"
        "    except Exception as error: print(type(error).__name__, flush=True)\n"
        "    sys.stdin.readline()"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "part")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "JobError\n"
        journal.close()
        assert other.communicate("again\n")[0] == "" and other.returncode == 0


def test_error_rows_are_counted_when_the_file_is_read_again(tmp_path):
    """A resumed job once counted the error rows of its own run alone."""
    plain, openai = {"id": None, "error": "x 1"}, {"id": "batch_req_3", "custom_id": "c", "error": {"message": "y"}}
    rows = [b"{}", *(json.dumps(row).encode() for row in (plain, {**plain, "id": "b"}, openai)), b'{"!": 1}']
    errors = [None, (None, "x 1"), ("b", "x 1"), ("c", "y"), None]
    with Journal(tmp_path / "part") as journal:
        journal.recover(9)
        for number in (3, 0, 2, 1, 4):
            journal.append(number, rows[number], errors[number])
        assert journal.num_rows == 5 and list(journal.rows()) == rows
        before = journal.errors.by_kind()
    kinds = [{"rows": 2, "first": "row 2", "error": "x 1"}, {"rows": 1, "first": "row 4, id 'c'", "error": "y"}]
    with Journal(tmp_path / "part") as journal:
        journal.recover(9)
        assert journal.errors.by_kind() == before == kinds and journal.errors.num_rows == 3
        journal.recover(9)
        assert journal.errors.num_rows == 3, "counted once"
    assert b" !" in (tmp_path / "part").read_bytes()


def test_a_changed_mark_of_an_error_row_drops_its_line(tmp_path):
    with Journal(tmp_path / "part") as journal:
        journal.recover(1)
        journal.append(0, b'{"id": null, "error": "x"}', (None, "x"))
    whole = (tmp_path / "part").read_bytes()
    (tmp_path / "part").write_bytes(whole.replace(b"!", b""))
    assert recovered(tmp_path / "part", 1) == {}


@pytest.mark.parametrize("call", ["recover", "rows"])
def test_a_journal_that_cannot_be_read_is_named(tmp_path, monkeypatch, call):
    """The output was named in its place, as one that cannot be written."""
    appended(tmp_path / "part")

    def fails(*arguments: object) -> bytes:
        raise OSError(5, "Input/output error")

    with Journal(tmp_path / "part") as journal:
        journal.recover(5)
        monkeypatch.setattr(os, "pread", fails)
        with pytest.raises(JobError, match=r"part cannot be read: Input/output error\. Run the same command again"):
            list(journal.rows()) if call == "rows" else journal.recover(5)
        monkeypatch.undo()
    assert len(recovered(tmp_path / "part")) == 5


def test_a_file_system_without_locks_is_not_taken_for_another_process(tmp_path, monkeypatch):
    def fails(*arguments: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(JobError, match="part cannot be locked: No locks available; choose an output on another disk"):
        Journal(tmp_path / "part")
