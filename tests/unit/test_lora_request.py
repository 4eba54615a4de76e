"""LoRARequest: what it takes, where its files are, and when two requests mean the same values."""

import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.lora import LoRARequest
from nanovllm.models.directory import find_adapter

CONFIG = {"r": 4}


def save_files(directory: Path) -> Path:
    directory.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).write_bytes(b"12345678")
    return directory


def test_arguments_come_in_vllms_order():
    request = LoRARequest("sql", 3, "directory")
    assert (request.lora_name, request.lora_int_id, request.lora_path) == ("sql", 3, "directory")
    assert LoRARequest("sql", 3, Path("directory")).lora_path == Path("directory")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("", 1, "p"), TypeError, "lora_name must be a name, not ''"),
        ((7, 1, "p"), TypeError, "lora_name must be a name, not 7"),
        (("a", "1", "p"), TypeError, "lora_int_id must be an integer, not '1'"),
        (("a", True, "p"), TypeError, "lora_int_id must be an integer, not True"),
        (("a", 0, "p"), ValueError, "lora_int_id must be at least 1, not 0; 0 is the model without an adapter"),
        (("a", 1, 3), TypeError, "lora_path of adapter 'a' must be a path, not 3"),
        (("a", 1), ValueError, "adapter 'a' needs either a lora_path or tensors"),
        (("a", 1, "p", {}, CONFIG), ValueError, "adapter 'a' needs either a lora_path or tensors"),
        (("a", 1, "", {}), ValueError, "adapter 'a': tensors and config go together"),
        (("a", 1, "p", None, CONFIG), ValueError, "adapter 'a': tensors and config go together"),
        (("a", 1, "", [1], CONFIG), TypeError, "tensors of adapter 'a' must be a mapping, not a list"),
    ],
)
def test_other_arguments_are_refused(arguments: tuple[Any, ...], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        LoRARequest(*arguments)


def test_a_config_of_peft_is_told_how_to_be_a_mapping():
    class Config:
        def to_dict(self) -> dict:
            return CONFIG

    with pytest.raises(TypeError, match=r"config of adapter 'a' must be a mapping, not a Config; call its to_dict\(\)"):
        LoRARequest("a", 1, tensors={}, config=Config())  # type: ignore[arg-type]


def test_a_fingerprint_changes_with_the_files(tmp_path):
    directory = save_files(tmp_path / "a")
    first = LoRARequest("a", 1, directory).fingerprint()
    assert first == LoRARequest("b", 2, str(directory)).fingerprint()
    assert hash(first) == hash(LoRARequest("b", 2, str(directory)).fingerprint())
    seen = {first, LoRARequest("a", 1, save_files(tmp_path / "b")).fingerprint()}
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        path = directory / name
        status = path.stat()
        path.write_bytes(b"123456789")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # another size at the same time
        seen.add(LoRARequest("a", 1, directory).fingerprint())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        seen.add(LoRARequest("a", 1, directory).fingerprint())
    assert len(seen) == 6


def test_another_file_with_the_same_size_and_time_is_seen(tmp_path):
    """As after cp -p, or if a link leads to another checkpoint."""
    directory = save_files(tmp_path / "a")
    path = directory / "adapter_model.safetensors"
    first, status = LoRARequest("a", 1, directory).fingerprint(), path.stat()
    (tmp_path / "other").write_bytes(bytes(status.st_size))
    os.replace(tmp_path / "other", path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert LoRARequest("a", 1, directory).fingerprint() != first


def test_a_request_with_changed_files_sees_them(tmp_path):
    """One that is made once and passed to many calls."""
    directory = save_files(tmp_path / "a")
    request = LoRARequest("a", 1, directory)
    before = request.fingerprint()
    (directory / "adapter_model.safetensors").write_bytes(b"1")
    assert request.fingerprint() != before
    before = request.fingerprint()
    (directory / "adapter_model.safetensors").unlink()
    assert request.fingerprint() != before


def test_tensors_are_copied_and_named_by_their_request():
    """Trainers change tensors in place, and fused optimizers do so unseen."""
    tensors, config = {"a": torch.zeros(2, requires_grad=True)}, {**CONFIG, "r": 4}
    request = LoRARequest("a", 1, tensors=tensors, config=config)
    with torch.no_grad():
        tensors["a"].add_(1)
    tensors["b"], config["r"] = torch.ones(1), 5
    assert request.tensors is not None and list(request.tensors) == ["a"] and not request.tensors["a"].any()
    assert request.config == {**CONFIG, "r": 4} and not request.tensors["a"].requires_grad
    assert request.fingerprint() == request.fingerprint() and request.key == request.key
    again = LoRARequest("a", 1, tensors=request.tensors, config=config)
    assert request.fingerprint() != again.fingerprint() and request.key != again.key


def test_an_engine_does_not_keep_the_tensors_of_a_request():
    request = LoRARequest("a", 1, tensors={"a": torch.zeros(2)}, config=CONFIG)
    reference, kept = weakref.ref(request.tensors["a"]), (request.fingerprint(), request.key)
    del request
    assert reference() is None and kept


@pytest.mark.parametrize("path", ["/none/at/all", "./none", "a/b/c", "~/none at all"])
def test_a_path_that_is_no_directory_is_refused(path):
    with pytest.raises(ValueError, match=rf"lora_path of adapter 'a': '{path}' is not a directory$"):
        find_adapter(LoRARequest("a", 1, path))


def test_a_home_directory_is_found(tmp_path, monkeypatch):
    save_files(tmp_path / "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_adapter(LoRARequest("a", 1, "~/a")) == tmp_path / "a"
    assert LoRARequest("a", 1, "~/a").fingerprint() == LoRARequest("a", 1, tmp_path / "a").fingerprint()


def test_of_a_hub_name_only_the_files_of_an_adapter_are_fetched(tmp_path, monkeypatch):
    directory, asked = save_files(tmp_path / "a"), []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, sorted(allow_patterns)))
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    request = LoRARequest("a", 1, "someone/an-adapter")
    assert request.fingerprint() == request.fingerprint() != LoRARequest("a", 1, directory).fingerprint()
    assert find_adapter(request) == directory
    assert asked == [("someone/an-adapter", ["adapter_config.json", "adapter_model.safetensors"])]


def test_without_the_hub_the_error_says_what_to_check(monkeypatch):
    def download(*arguments: Any, **kw: Any) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    message = (
        r"lora_path of adapter 'a': 'someone/none' is not a directory, and the hub does not give it "
        r"\(ConnectionError: offline\); check the name, the network.*or give the directory of a downloaded adapter$"
    )
    with pytest.raises(ValueError, match=message):
        find_adapter(LoRARequest("a", 1, "someone/none"))


def test_importing_it_imports_no_torch():
    code = "import sys, nanovllm.lora; print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
