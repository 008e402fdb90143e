"""The API page: the description of openapi.py as HTML.

It is self-contained: no script, and no font or style from elsewhere; its headers forbid these.
"""

import base64
import hashlib
import json
import re
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6470; --line: #dde1e6; --page: #fff; --box: #f5f6f8;
  --get: #1769aa; --post: #177245; --delete: #a4262c; --link: #1558b0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --soft: #9aa4b1; --line: #333a43; --page: #14171a;
  --box: #1d2126; --get: #6cb6ff; --post: #57c98b; --delete: #ff7b72; --link: #86b7fe; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; margin: 0; } h2 { margin: 2.5rem 0 .25rem; font-size: 1.25rem; }
h3 { margin: 1.2rem 0 .4rem; font-size: .95rem; }
p { margin: .4rem 0; } a { color: var(--link); } .soft { color: var(--soft); }
code, pre { font: .87em/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: .4rem; padding: .7rem .8rem;
  overflow-x: auto; white-space: pre; margin: .4rem 0; }
details { border: 1px solid var(--line); border-radius: .5rem; margin: .5rem 0; padding: 0 .9rem; }
details[open] { padding-bottom: .9rem; } summary { cursor: pointer; padding: .6rem 0; }
[id] { scroll-margin-top: 4rem; }
summary code { font-weight: 600; } summary .soft { display: block; font-size: .92rem; }
.verb { display: inline-block; min-width: 3.2rem; font-weight: 700; } .get { color: var(--get); }
.post { color: var(--post); } .delete { color: var(--delete); }
dl { margin: 0; } dt { margin-top: .55rem; padding-top: .55rem; border-top: 1px solid var(--line); }
dl > dt:first-child { border-top: 0; margin-top: 0; }
dt code { font-weight: 600; } dd { margin: .1rem 0 0; } .need { color: var(--post); font-size: .85rem; }
table { border-collapse: collapse; width: 100%; } td { border-top: 1px solid var(--line); padding: .3rem .5rem .3rem 0;
  vertical-align: top; } td:first-child { white-space: nowrap; }
"""

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

Object = dict[str, Any]


def page(api: Object, url: str) -> str:
    """The page of a description; `url` is the server of its examples."""
    return _Page(api, url).html()


class _Page:
    def __init__(self, api: Object, url: str) -> None:
        self._api = api
        self._url = url
        self._schemas: Object = api["components"]["schemas"]

    def html(self) -> str:
        info = self._api["info"]
        parts = [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(info['title'])} API</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(info['title'])} <span class=soft>{escape(info['version'])}</span></h1>",
            f"<p>{escape(info['summary'])} {_text(info['description'])}</p>",
        ]
        if "security" in self._api:
            parts.append("<p>Requests need an API key: <code>Authorization: Bearer KEY</code>.</p>")
        parts.append("<p>For programs: <a href=openapi.json>openapi.json</a>.</p>")
        for tag in self._api["tags"]:
            routes = [
                self._route(path, verb, route)
                for path, verbs in self._api["paths"].items()
                for verb, route in verbs.items()
                if tag["name"] in route["tags"]
            ]
            if routes:
                parts += [f"<h2>{escape(tag['name'])}</h2><p class=soft>{_text(tag['description'])}</p>", *routes]
        parts += ["<h2>Types</h2>", "<p class=soft>The types of bodies and replies.</p>"]
        parts += [self._type(name, schema) for name, schema in sorted(self._schemas.items())]
        return "".join([*parts, "</body></html>"])

    def _route(self, path: str, verb: str, route: Object) -> str:
        parts = [
            "<details><summary>",
            f"<code><span class='verb {verb}'>{verb.upper()}</span> {escape(path)}</code>"
            f"<span class=soft>{_text(route['summary'])}</span></summary>{_anchor(route['operationId'])}",
            f"<pre>{escape(self._curl(path, verb, route))}</pre>",
        ]
        for one in route.get("parameters", ()):
            what = f"<code>{escape(one['name'])}</code> <span class=soft>in the {escape(one['in'])}</span>"
            parts.append(f"<p>{what} {_text(one.get('description', ''))}</p>")
        if "requestBody" in route:
            schema = route["requestBody"]["content"]["application/json"]["schema"]
            parts += ["<h3>Body</h3>", self._fields(schema)]
        good = route["responses"]["200"]
        kinds = " or ".join(
            f"<code>{escape(media)}</code> {self._kind(one['schema'])}"
            for media, one in good.get("content", {}).items()
        )
        parts += ["<h3>Reply</h3>", f"<p>{kinds or 'empty'}</p>"]
        if good["description"] != route["summary"]:
            parts.append(f"<p>{_text(good['description'])}</p>")
        parts.append("<h3>Errors</h3><table>")
        for status, reference in route["responses"].items():
            if status != "200":
                error = self._api["components"]["responses"][reference["$ref"].rpartition("/")[2]]
                parts.append(f"<tr><td>{status}</td><td>{_text(error['description'])}</td></tr>")
        return "".join([*parts, "</table></details>"])

    def _curl(self, path: str, verb: str, route: Object) -> str:
        for one in route.get("parameters", ()):
            if one["in"] == "path":
                values = one["schema"].get("enum") or one["schema"]["examples"]
                path = path.replace("{" + one["name"] + "}", values[0])
        has_method = verb != "get" and "requestBody" not in route
        line = "curl" + (f" -X {verb.upper()}" if has_method else "") + f" {self._url}{path}"
        if "security" in self._api and "security" not in route:
            line += ' \\\n  -H "Authorization: Bearer $PIPELINE_API_KEY"'
        if "requestBody" in route:
            example = route["requestBody"]["content"]["application/json"].get("example", {})
            line += f" \\\n  -H 'Content-Type: application/json' \\\n  -d '{json.dumps(example, ensure_ascii=False)}'"
        return line

    def _type(self, name: str, schema: Object) -> str:
        words = _text(schema.get("description", ""))
        summary = f"<summary><code>{escape(name)}</code><span class=soft>{words}</span></summary>"
        return f"<details>{summary}{_anchor(f'type-{name}')}{self._fields(schema)}</details>"

    def _fields(self, schema: Object) -> str:
        """The fields of an object, required ones first."""
        fields, needed = self._properties(schema)
        if not fields:
            return f"<p>{self._kind(schema)}</p>"
        parts = ["<dl>"]
        for name in sorted(fields, key=lambda name: name not in needed):
            field = fields[name]
            need = " <span class=need>required</span>" if name in needed else ""
            parts.append(f"<dt><code>{escape(name)}</code> <span class=soft>{self._kind(field)}</span>{need}</dt>")
            if words := self._words(field):
                parts.append(f"<dd>{_text(words)}</dd>")
        return "".join([*parts, "</dl>"])

    def _properties(self, schema: Object) -> tuple[Object, list[str]]:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        fields, needed = dict(schema.get("properties", {})), list(schema.get("required", ()))
        for part in schema.get("allOf", ()):
            more, also = self._properties(part)
            fields |= more
            needed += also
        return fields, needed

    def _words(self, schema: Object) -> str:
        found = [schema["description"]] if "description" in schema else []
        return " ".join(dict.fromkeys([*found, *(self._words(one) for one in schema.get("anyOf", ()))])).strip()

    def _kind(self, schema: Object) -> str:
        """A short description of a value's type."""
        if "$ref" in schema:
            name = escape(schema["$ref"].rpartition("/")[2])
            return f"<a href=#type-{name}>{name}</a>"
        if "anyOf" in schema:
            return " or ".join(dict.fromkeys(self._kind(one) for one in schema["anyOf"]))
        if "enum" in schema:
            return " or ".join(f"<code>{escape(json.dumps(one, ensure_ascii=False))}</code>" for one in schema["enum"])
        names = schema.get("type", "any")
        words = " or ".join(names) if isinstance(names, list) else names
        if "items" in schema:
            words = words.replace("array", f"array of ({self._kind(schema['items'])})" if schema["items"] else "array")
        return f"{words}{_bounds(schema)}"


def _anchor(name: str) -> str:
    """A link to its own section. It is below the summary, because a browser opens a folded section that contains the
    link's target."""
    return f'<p class=soft id="{escape(name)}"><a href="#{escape(name)}">#{escape(name)}</a></p>'


_FROM = (("minimum", "≥ "), ("exclusiveMinimum", "&gt; "), ("minLength", "≥ "), ("minItems", "≥ "))
_TO = (
    ("maximum", "≤ "),
    ("exclusiveMaximum", "&lt; "),
    ("maxLength", "≤ "),
    ("maxItems", "≤ "),
    ("maxProperties", "≤ "),
)


def _bounds(schema: Object) -> str:
    words = [f"{sign}{schema[name]:,}" for name, sign in (*_FROM, *_TO) if name in schema]
    of = (
        " characters"
        if {"minLength", "maxLength"} & set(schema)
        else " entries"
        if {"minItems", "maxItems", "maxProperties"} & set(schema)
        else ""
    )
    return f", {', '.join(words)}{of}" if words else ""


def _text(words: str) -> str:
    """Escaped text; parts in backquotes become code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))
