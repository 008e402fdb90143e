"""Random values for a JSON Schema, as /openapi.json has them."""

import random
import string
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

COUNTS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict"})
"""Fields that say how much is generated."""
FEW = frozenset({"n", "best_of", "min_tokens"})
MOST = 3
"""Their values, so that a case costs little."""
WORDS = ("a", "The cat", "1, 2, 3", "Grüße", "世界", "🙂", "\n", "", "{", "user", "assistant", "system", "get_weather")


class Values:
    """Makes values. `schemas` are the description's components, by name."""

    def __init__(self, schemas: Mapping[str, Schema], rng: random.Random) -> None:
        self._schemas = schemas
        self._rng = rng

    def of(self, schema: Schema, depth: int = 0) -> Any:
        """A value that the schema allows, of bounded size."""
        rng = self._rng
        if "$ref" in schema:
            return self.of(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self.of(self._simplest(schema[key]) if depth > 6 else rng.choice(schema[key]), depth)
        if "allOf" in schema:
            return {name: value for part in schema["allOf"] for name, value in self._object(part, depth).items()}
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        return self._typed(kind, schema, depth)

    def _typed(self, kind: str, schema: Schema, depth: int) -> Any:
        rng = self._rng
        match kind:
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "integer":
                return int(self._number(schema, 8))
            case "number":
                return round(self._number(schema, 2.0), 3)
            case "array":
                least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
                num = rng.randint(least, max(least, min(most, 3 if depth < 4 else 0)))
                return [self.of(schema.get("items", {}), depth + 1) for _ in range(num)]
            case "object":
                return self._object(schema, depth)
        text = rng.choice(WORDS) if rng.random() < 0.7 else "".join(rng.choices(string.printable, k=rng.randint(1, 30)))
        return text[: schema.get("maxLength", len(text))].ljust(schema.get("minLength", 0), "a")

    def _object(self, schema: Schema, depth: int) -> dict[str, Any]:
        if "$ref" in schema:
            return self._object(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        rng = self._rng
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        share = min(0.5, 2 / max(1, len(properties)))
        found = {}
        for name, one in properties.items():
            if name in required or rng.random() < share:
                found[name] = rng.randint(1, MOST) if name in COUNTS | FEW else self.of(one, depth + 1)
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping) and depth < 4:
            for _ in range(rng.randint(0, 2)):
                found[rng.choice(("1", "7", "a", "x y"))] = self.of(more, depth + 1)
        return found

    def _number(self, schema: Schema, default: float) -> float:
        least = schema.get("minimum", schema.get("exclusiveMinimum", -default))
        most = schema.get("maximum", schema.get("exclusiveMaximum", least + default))
        if self._rng.random() < 0.1:
            return float(self._rng.choice((least, most)))
        return self._rng.uniform(least, min(most, least + default))

    def _simplest(self, schemas: "list[Schema]") -> Schema:
        return next((one for one in schemas if one.get("type") in ("null", "string", "integer")), schemas[0])


def cheap(value: Any) -> Any:
    """The value with few tokens to generate: fields that count them are lowered at any depth."""
    if isinstance(value, dict):
        return {
            name: min(one, MOST) if name in COUNTS | FEW and type(one) is int and one > 0 else cheap(one)
            for name, one in value.items()
        }
    return [cheap(one) for one in value] if isinstance(value, list) else value
