"""A GGUF file of a hub is fetched by the name of its types, and nothing else."""

from __future__ import annotations

from tests.gguf.files import write_gguf
from tests.hub.fake_hub import NAME, running_hub
from tests.hub.test_fetch_model import fetch


def test_only_the_file_of_the_type_is_fetched(tmp_path):
    from frame.testing.checkpoints import make_checkpoint

    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=1)
    data = write_gguf(plain, tmp_path / "m.gguf").read_bytes()
    files = {"Tiny-Q4_K_M.gguf": data, "Tiny-Q8_0.gguf": b"other", "README.md": b"#", "model.bin": b"pickle"}
    with running_hub(files) as hub:
        found = fetch(hub, tmp_path, model=f"{NAME}:q4_k_m", download_dir=str(tmp_path / "models"))
        assert "Tiny-Q4_K_M-" in found
        assert hub.sent() == ["Tiny-Q4_K_M.gguf"]
        assert "refused: model 'org/tiny:Q6_K': it has no GGUF file of Q6_K" in fetch(
            hub, tmp_path, model=f"{NAME}:Q6_K", download_dir=str(tmp_path / "models")
        )
