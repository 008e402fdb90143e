"""Images in chats with a model of .gguf files: the language model's, and llama.cpp's `mmproj` beside it."""

from pathlib import Path

import pytest
import torch

from tests.compiled import link_kernels
from tests.e2e.models.test_images import CHATS, chat, png, refused, theirs
from tests.e2e.recovery.test_recovery import post
from tests.e2e.server import Server
from tests.stages.execute.vision.tiny_towers import TEXT, VARIANTS, Variant, make
from tests.stages.ingest.media.test_prompt_images import SMOLVLM
from tests.stages.prepare.gguf.projector_files import save_language_model, save_projector, token_id


@pytest.mark.parametrize("name", ["idefics3", "llava", "mistral3"])
def test_the_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    found = VARIANTS[name]
    text = {**found.changes.get("text_config", TEXT), "max_position_embeddings": 1024}
    model = make(Variant(found.kind, found.vision, {**found.changes, "text_config": text}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and "vision" not in key:  # matrices of F32 become bfloat16 in the prepared folder
                parameter.copy_(parameter.bfloat16().float())
    path = save_language_model(tmp_path / "tiny.gguf", model, chat_template=SMOLVLM.replace("<image>", image_of(name)))
    save_projector(tmp_path / "mmproj-f32.gguf", model)
    cache = link_kernels(tmp_path / "cache")
    settings = (f"model={path}", f"cache_dir={cache}", "execute.kernels=torch", "execute.dtype=float32")
    with Server(*settings, "execute.encoder_cache_bytes=1MiB") as server:
        folder = next(cache.rglob("media.json")).parent
        model.config.image_token_id = model.model.image_token_id = token_id(folder, image_of(name))
        for parts in (("What is it? ", png(1)), (png(2, (40, 30)), "and?")):
            ours = post(server, CHATS, **chat(*parts))
            data = [one for one in parts if isinstance(one, bytes)]
            assert ours["choices"][0]["token_ids"] == theirs(model, folder, ours["prompt_token_ids"], *data)
    if name == "idefics3":
        (tmp_path / "mmproj-f32.gguf").unlink()
        with Server(*settings, "execute.encoder_cache_bytes=1MiB") as server:
            assert "this model reads text only" in refused(server, chat("x", png(1)))["message"]


def image_of(name: str) -> str:
    return "[IMG]" if name == "mistral3" else "<image>"
