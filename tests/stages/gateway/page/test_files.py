"""The files of the web page: their routes and headers, that they need nothing from elsewhere, and the setting."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.http_server.access.guard import PAGE_PREFIX
from pipeline.runtime import messages as m
from pipeline.stages.gateway.page import files
from tests.stages.gateway.gate import CHAT, Gate
from tests.stages.gateway.http.access.test_guard import RIGHT, assert_refused, locked

NAMES = {path.removeprefix(PAGE_PREFIX) for path in files.paths()}
SOURCES = {path: path.read_text("utf-8") for path in files.paths().values()}
SCRIPTS = {path: text for path, text in SOURCES.items() if path.suffix == ".js"}


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as gate:
        yield gate


def policy_of(header: str) -> dict[str, list[str]]:
    """The directives of a Content-Security-Policy."""
    return {name: values for name, *values in (part.split() for part in header.split(";"))}


def test_each_file_is_served_with_its_type_and_a_strict_policy(gate: Gate) -> None:
    kinds = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
    for path, file in files.paths().items():
        response = gate.client.get(path)
        assert (response.status_code, response.content) == (200, file.read_bytes())
        assert response.headers["Content-Type"] == f"{kinds[file.suffix]}; charset=utf-8"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        policy = policy_of(response.headers["Content-Security-Policy"])
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == ["'none'"]
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == ["'self'"]
        assert policy["require-trusted-types-for"] == ["'script'"]
        sources = {source for values in policy.values() for source in values}
        assert sources == {"'none'", "'self'", "'script'", "blob:"}
        assert gate.client.head(path).headers["Content-Length"] == str(file.stat().st_size)


def test_a_browser_keeps_files_that_have_not_changed(gate: Gate) -> None:
    first = gate.client.get("/page/main.js")
    again = gate.client.get("/page/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["ETag"] == first.headers["ETag"]
    assert gate.client.get("/page/main.js", headers={"If-None-Match": '"other"'}).status_code == 200
    assert gate.client.get("/").headers["ETag"] != first.headers["ETag"]


def test_other_paths_are_not_found(gate: Gate) -> None:
    for path in ("/page", "/page/", "/page/index.html", "/page/x.js", "/page/..%2Ffiles.py", "/main.js"):
        assert gate.client.get(path).status_code == 404


def test_the_page_is_only_read(gate: Gate) -> None:
    response = gate.client.post("/", json={})
    assert (response.status_code, response.headers["Allow"]) == (405, "GET,HEAD")


def test_the_page_can_be_turned_off(tmp_path: Path) -> None:
    with Gate(tmp_path, page=False) as gate:
        assert {gate.client.get(path).status_code for path in files.paths()} == {404}
        assert gate.client.get("/v1/models").status_code == 200


def test_with_keys_the_files_are_open_and_all_else_is_not(tmp_path: Path) -> None:
    with locked(tmp_path) as gate:
        for path in files.paths():
            assert gate.client.get(path).status_code == 200
        assert_refused(gate.client.post("/"), "API key required")
        assert_refused(gate.client.get("/pipeline"), "API key required")
        for path in ("/page/", "/page/nothing.js", "/main.js"):
            assert_refused(gate.client.get(path), "API key required")
        reply = gate.do(gate.client.post, "/v1/chat/completions", json=CHAT, headers=RIGHT)
        gate.delta(gate.begin(), "Hi", finish=m.Finish.LENGTH)
        assert reply.result().status_code == 200


def test_with_keys_a_page_that_is_off_needs_a_key_like_every_path(tmp_path: Path) -> None:
    with locked(tmp_path, page=False) as gate:
        assert_refused(gate.client.get("/"), "API key required")
        assert gate.client.get("/", headers=RIGHT).status_code == 404


def test_an_admin_listener_leaves_the_page_open_and_closes_the_rest(tmp_path: Path) -> None:
    with locked(tmp_path, admin=True) as gate:
        assert gate.client.get("/").status_code == 200
        assert_refused(gate.client.get("/metrics"), "API key required")


def test_without_keys_the_page_is_not_for_other_hosts(gate: Gate) -> None:
    assert gate.client.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_the_page_names_only_files_that_exist() -> None:
    html = SOURCES[files.paths()["/"]]
    linked = set(re.findall(r'(?:src|href)="(page/[^"]+)"', html))
    assert linked and {link.removeprefix("page/") for link in linked} <= NAMES
    for path, text in SCRIPTS.items():
        for name in re.findall(r'^import [^;]*? from "([^"]+)";$', text, re.MULTILINE):
            assert name.startswith("."), f"{path}: {name} is not a file of the page"
            assert (path.parent / name).resolve() in {one.resolve() for one in SCRIPTS}, f"{path}: no file {name}"


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path, text in SOURCES.items():
        addresses = set(re.findall(r"https?://[^\s\"'`)/]+", text)) - {"http://www.w3.org"}  # SVG's namespace
        assert not addresses, f"{path}: {addresses}"
        assert "url(" not in text and "@import" not in text


def test_no_script_or_style_is_inline() -> None:
    html = SOURCES[files.paths()["/"]]
    assert not re.search(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", html)


def test_scripts_never_parse_html_or_code() -> None:
    words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|srcdoc|javascript:"
    found = {str(path): re.findall(words, text) for path, text in SCRIPTS.items()}
    assert not [path for path, names in found.items() if names]
    for path, text in SCRIPTS.items():
        assert ", style:" not in text, f"{path}: the policy forbids style attributes"
