"""The table of dialects: the routes of each API, with its parsers."""

from pipeline.stages.gateway.apis.anthropic import routes as anthropic
from pipeline.stages.gateway.apis.cohere import routes as cohere
from pipeline.stages.gateway.apis.embeddings import routes as embeddings
from pipeline.stages.gateway.apis.infill import routes as infill
from pipeline.stages.gateway.apis.ollama import routes as ollama
from pipeline.stages.gateway.apis.openai import routes as openai
from pipeline.stages.gateway.apis.pooling import routes as pooling
from pipeline.stages.gateway.apis.responses import routes as responses
from pipeline.stages.gateway.apis.scoring import routes as scoring
from pipeline.stages.gateway.apis.tokens import routes as tokens
from pipeline.stages.gateway.http.route import Route

API_ROUTES: tuple[Route, ...] = (
    *openai.ROUTES,
    *responses.ROUTES,
    *anthropic.ROUTES,
    *embeddings.ROUTES,
    *scoring.ROUTES,
    *pooling.ROUTES,
    *cohere.ROUTES,
    *tokens.ROUTES,
    *ollama.ROUTES,
    *infill.ROUTES,
)
