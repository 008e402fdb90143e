"""LoRA adapters at the gateway: chosen by the model's name, listed, loaded and unloaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import LoraSettings
from pipeline.lora.adapter_file import AdapterFile, path_of
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.gateway.admin import adapters
from tests.lora.random_adapters import write_adapter
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate

SQL = m.Adapter("sql", "a" * 32, "/adapters/sql")
OTHER = m.Adapter("org/other", "b" * 32, "/adapters/other")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, lora=LoraSettings(runtime_loading=True, max_lora_rank=8)) as gate:
        tell(gate, SQL, OTHER)
        yield gate


def tell(gate: Gate, *reported: m.Adapter) -> None:
    gate.rig.send(m.Adapters(list(reported)), "supervisor.0")
    gate.rig.load()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT | {"max_tokens": 4}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 2}}),
        ("/invocations", COMPLETION),
    ],
)
def test_the_model_s_name_chooses_the_adapter(gate: Gate, path: str, body: dict[str, Any]) -> None:
    for name, adapter_id in ((SQL.name, SQL.id), (OTHER.name, OTHER.id), (MODEL, "")):
        gate.post(body | {"model": name}, path)
        submit = gate.rig.receive("ingest", m.Submit)
        assert submit.options.adapter_id == adapter_id
        gate.rig.send(m.Rejected(submit.request_id, submit.attempt, m.Failure(400, "no")), "ingest.0")


def test_a_reply_names_the_adapter(gate: Gate) -> None:
    response = gate.post(COMPLETION | {"model": SQL.name}, "/v1/completions/render")
    submit = gate.rig.receive("ingest", m.Submit)
    gate.rig.send(m.Accepted(submit.request_id, submit.attempt, b"\1\0\0\0"), "ingest.0")
    assert response.result().json()[0]["model"] == SQL.name


def test_an_unknown_name_is_404_and_the_error_tells_of_adapters(gate: Gate) -> None:
    response = gate.client.post("/v1/completions", json=COMPLETION | {"model": "none"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "adapters of it, which GET /v1/models lists" in response.json()["error"]["message"]


def test_the_list_of_models_has_the_adapters(gate: Gate) -> None:
    found = {one["id"]: (one["root"], one["parent"]) for one in gate.client.get("/v1/models").json()["data"]}
    assert found == {MODEL: (MODEL, None), "sql": (SQL.path, MODEL), "org/other": (OTHER.path, MODEL)}
    assert gate.client.get("/v1/models/org/other").json()["root"] == OTHER.path
    assert gate.client.get("/v1/models/none").status_code == 404


def test_an_unloaded_adapter_is_gone_for_new_requests(gate: Gate) -> None:
    tell(gate, OTHER)
    assert gate.client.post("/v1/completions", json=COMPLETION | {"model": "sql"}).status_code == 404
    assert [one["id"] for one in gate.client.get("/v1/models").json()["data"]] == [MODEL, "org/other"]


def load(gate: Gate, **fields: Any) -> Any:
    return gate.post(fields, "/v1/load_lora_adapter")


def test_loading_converts_the_folder_and_waits_for_the_supervisor(gate: Gate, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "peft", ModelConfig.load(tmp_path), rank=2)
    response = load(gate, lora_name="new", lora_path=str(folder))
    asked = gate.rig.receive("supervisor", m.SetAdapter)
    assert (asked.adapter.name, asked.adapter.path) == ("new", str(folder))
    assert AdapterFile(path_of(tmp_path, asked.adapter.id)).header.max_rank == 2
    assert not response.done()
    gate.rig.send(m.Adapters([asked.adapter]), "supervisor.0")
    gate.rig.send(m.AdapterSet(asked.nonce), "supervisor.0")
    assert response.result().status_code == 200
    assert response.result().text == "Success: LoRA adapter 'new' added successfully."
    assert [one["id"] for one in gate.client.get("/v1/models").json()["data"]] == [MODEL, "new"]


def test_unloading_waits_for_the_supervisor(gate: Gate) -> None:
    response = gate.post({"lora_name": "sql"}, "/v1/unload_lora_adapter")
    asked = gate.rig.receive("supervisor", m.SetAdapter)
    assert asked.adapter == m.Adapter("sql", "", "")
    gate.rig.send(m.AdapterSet(asked.nonce), "supervisor.0")
    assert response.result().text == "Success: LoRA adapter 'sql' removed successfully."
    assert gate.client.post("/v1/unload_lora_adapter", json={"lora_name": "none"}).status_code == 404


def test_loads_that_are_refused(gate: Gate, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "peft", ModelConfig.load(tmp_path), rank=9)
    for fields, words in (
        ({"lora_name": "sql", "lora_path": str(folder)}, "the adapter 'sql' is loaded already"),
        ({"lora_name": MODEL, "lora_path": str(folder)}, "is the model itself"),
        ({"lora_name": "x", "lora_path": "relative"}, "must be an absolute path"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, "is no adapter that the server may load"),
        ({"lora_name": "x", "lora_path": str(folder)}, "the rank is 9, but lora.max_lora_rank is 8"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "", "lora_path": str(folder)}, "lora_name"),
    ):
        response = load(gate, **fields).result()
        assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
    assert gate.rig.nothing("supervisor", 0)


def test_an_adapter_can_t_have_an_alias_of_the_model(tmp_path: Path) -> None:
    """It would take the requests that other clients send to the model."""
    with Gate(tmp_path, aliases=("gpt-x",), lora=LoraSettings(runtime_loading=True)) as gate:
        gate.rig.load()
        response = load(gate, lora_name="gpt-x", lora_path=str(tmp_path)).result()
        assert response.status_code == 400 and "'gpt-x', which is the model itself" in response.text


def test_load_inplace_replaces_an_adapter(gate: Gate, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "peft", ModelConfig.load(tmp_path))
    response = load(gate, lora_name="sql", lora_path=str(folder), load_inplace=True)
    asked = gate.rig.receive("supervisor", m.SetAdapter)
    assert not asked.is_new
    gate.rig.send(m.AdapterSet(asked.nonce), "supervisor.0")
    assert response.result().status_code == 200


def test_of_two_loads_of_one_name_at_once_the_second_is_refused(gate: Gate, tmp_path: Path) -> None:
    """Both are converted before the supervisor is asked. Which name is there, the supervisor knows."""
    folder = write_adapter(tmp_path / "peft", ModelConfig.load(tmp_path))
    responses = [load(gate, lora_name="new", lora_path=str(folder)) for _ in range(2)]
    asked = [gate.rig.receive("supervisor", m.SetAdapter) for _ in responses]
    assert all(one.is_new for one in asked)
    for one, is_taken in zip(asked, (False, True), strict=True):
        gate.rig.send(m.AdapterSet(one.nonce, is_taken), "supervisor.0")
    first, second = sorted((one.result() for one in responses), key=lambda one: one.status_code)
    assert (first.status_code, second.status_code) == (200, 400)
    assert second.json()["error"]["message"] == "the adapter 'new' is loaded already"


def test_a_missing_reply_of_the_supervisor_is_503(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "TIMEOUT_S", 0.05)
    with Gate(tmp_path, lora=LoraSettings(runtime_loading=True)) as gate:
        tell(gate, SQL)
        response = gate.client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "stage_unresponsive")


def test_loading_needs_the_setting(tmp_path: Path) -> None:
    with Gate(tmp_path) as gate:
        for path, body in (
            ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x"}),
            ("/v1/unload_lora_adapter", {"lora_name": "x"}),
        ):
            response = gate.client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (403, "forbidden")
            assert "lora.runtime_loading = true" in response.json()["error"]["message"]
