"""What is wrong with a KV connector's files and folders is told before anything is loaded."""

import re

import pytest

from frame import LLM
from frame.core.config.errors import ConfigError
from frame.core.config.flat import from_flat
from frame.core.interfaces.mesh import Mesh
from frame.core.plugin_host.registry import Registry
from frame.plugins.connectors.blocks.files import ROOT
from frame.testing.checkpoints import make_checkpoint
from frame.transfers.first_check import check_connector


def refusal(connector, options):
    with pytest.raises(ConfigError) as raised:
        check_connector(from_flat({"kv_connector": connector, "plugin": {connector: options}}), Mesh(), Registry.load())
    return str(raised.value)


@pytest.mark.parametrize("connector", ["nixl", "push", "mooncake", "peer"])
def test_a_wrong_secret_file(tmp_path, connector):
    short, there_not = tmp_path / "short", tmp_path / "none"
    short.write_text("guess me")
    for file, why in ((short, "must hold at least 16 characters"), (there_not, "cannot be read: No such file")):
        said = refusal(connector, {"secret_file": str(file)})
        assert said.startswith(f"KV connector '{connector}': secret_file {file} {why}")
    short.write_text("nobody can guess me")
    options = {connector: {"secret_file": str(short)}}
    check_connector(from_flat({"kv_connector": connector, "plugin": options}), Mesh(), Registry.load())


def folder_options(connector, folder):
    return {"folder": str(folder)} if connector == "disk" else {"size": 0.01, "disk_folder": str(folder)}


@pytest.mark.parametrize("connector", ["disk", "offload"])
def test_a_folder_that_cannot_be_used(tmp_path, connector):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        said = refusal(connector, folder_options(connector, folder))
        folder_of = f"the folder of the {connector} connector, {folder}, cannot be used"
        assert said == f"KV connector '{connector}': {folder_of}: Not a directory"
    fine = tmp_path / "is" / "made"
    options = {connector: folder_options(connector, fine)}
    check_connector(from_flat({"kv_connector": connector, "plugin": options}), Mesh(), Registry.load())
    assert not fine.parent.exists(), "a check makes nothing"


@pytest.mark.parametrize("connector", ["disk", "offload"])
def test_a_folder_that_others_could_write_to(tmp_path, connector):
    root = tmp_path / ROOT
    root.mkdir()
    root.chmod(0o755)
    said = refusal(connector, folder_options(connector, tmp_path))
    assert re.fullmatch(f".*, {root}, has owner .* mode 755: others could read prompts .* mode 700", said)


def test_nothing_is_loaded_before(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"no weights")
    settings = {"kv_connector": "nixl", "plugin": {"nixl": {"secret_file": str(tmp_path / "none")}}}
    with pytest.raises(ConfigError, match=r"^KV connector 'nixl': secret_file .*/none cannot be read: No such file"):
        LLM(str(folder), skip_tokenizer_init=True, **settings)
