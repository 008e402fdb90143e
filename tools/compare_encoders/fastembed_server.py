"""A plain server around fastembed, with POST /v1/embeddings: what many write for themselves.

Runs in the environment of engines.py: `python fastembed_server.py FOLDER PORT THREADS`. `FOLDER` has model.onnx and the
tokenizer's files.
"""

import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
from pydantic import BaseModel

NAME = "compared/model"


class Body(BaseModel):
    input: str | list[str]


def load(folder: Path, threads: int) -> TextEmbedding:
    TextEmbedding.add_custom_model(
        model=NAME,
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf=NAME),
        dim=384,
        model_file="model.onnx",
    )
    return TextEmbedding(NAME, specific_model_path=str(folder), threads=threads)


def app_of(model: TextEmbedding) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/embeddings")
    def embeddings(body: Body) -> dict[str, Any]:
        texts = [body.input] if isinstance(body.input, str) else body.input
        vectors = [vector.tolist() for vector in model.embed(texts)]
        return {"data": [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]}

    return app


if __name__ == "__main__":
    uvicorn.run(app_of(load(Path(sys.argv[1]), int(sys.argv[3]))), port=int(sys.argv[2]), log_level="warning")
