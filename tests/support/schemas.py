"""JSON schemas from a seeded generator: each can be fulfilled, in few tokens, and llguidance compiles it."""

import json
import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ["name", "id", "size", "kind", "x", "is_ok", "two words", "ключ", 'quo"te', "$ref", "enum", "a/b~c", "tags"]
_PATTERNS = ["^[a-z]{1,4}$", "^(red|green|blue)$", "^[A-Z][a-z]?-[0-9]{2}$", "^\\d{3}$", "^a.b$", '^[^"\\\\]{2}$']
_FORMATS = ["date", "time", "ipv4", "uuid", "email"]
_CONSTANTS = [0, -3, 1.5, True, None, "on", "", 'a "b"', "ü", [1, 2], {"k": None}]


def make_schemas(num: int, seed: int = 0) -> list[Schema]:
    """`num` different schemas. More of them begin with the same ones."""
    rng = random.Random(seed)
    schemas: dict[str, Schema] = {}
    while len(schemas) < num:
        schema = _Maker(rng).schema()
        schemas.setdefault(json.dumps(schema), schema)
    return list(schemas.values())


class _Maker:
    """Makes one schema, with its `$defs`."""

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._defs: dict[str, Schema] = {}

    def schema(self) -> Schema:
        schema = self._rng.choice([self._object, self._object, self._object, self._array, self._any])(2)
        return {**schema, "$defs": self._defs} if self._defs else schema

    def _any(self, depth: int) -> Schema:
        """A schema with at most `depth` levels of nested schemas."""
        flat = [self._string, self._string, self._integer, self._number, self._enum, self._simple]
        deep = [self._object, self._array, self._any_of, self._ref, self._tree]
        return self._rng.choice(flat + deep if depth else flat)(depth - 1)

    def _string(self, depth: int) -> Schema:
        kind = self._rng.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._rng.choice(_PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._rng.choice(_FORMATS)}
        least = self._rng.randrange(4)
        lengths = {"minLength": least, "maxLength": least + self._rng.randrange(5)}
        return {"type": "string", **lengths} if kind == 2 else {"type": "string", "maxLength": lengths["maxLength"]}

    def _integer(self, depth: int) -> Schema:
        least = self._rng.randrange(-200, 200)
        kind = self._rng.randrange(5)
        if kind == 0:
            return {"type": "integer"}
        if kind == 1:
            return {"type": "integer", "minimum": least}
        if kind == 2:
            return {"type": "integer", "exclusiveMinimum": least, "exclusiveMaximum": least + self._rng.randint(2, 50)}
        if kind == 3:
            return {"type": "integer", "multipleOf": self._rng.randint(2, 7), "minimum": 0, "maximum": 999}
        return {"type": "integer", "minimum": least, "maximum": least + self._rng.randrange(300)}

    def _number(self, depth: int) -> Schema:
        least = self._rng.choice([0, -1.5, 0.25, 10, -100])
        kind = self._rng.randrange(3)
        if kind == 0:
            return {"type": "number"}
        if kind == 1:
            return {"type": "number", "minimum": least, "maximum": least + self._rng.choice([0.5, 2, 99.75])}
        return {"type": "number", "exclusiveMinimum": least, "maximum": least + 1}

    def _enum(self, depth: int) -> Schema:
        if not self._rng.randrange(3):
            return {"const": self._rng.choice(_CONSTANTS)}
        return {"enum": self._rng.sample(_CONSTANTS, self._rng.randint(1, 5))}

    def _simple(self, depth: int) -> Schema:
        return {"type": self._rng.choice(["boolean", "null", ["boolean", "null"], ["integer", "null"]])}

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(_NAMES, self._rng.randint(1, 4))
        schema: Schema = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        if required := [name for name in names if self._rng.random() < 0.6]:
            schema["required"] = required
        kind = self._rng.randrange(8)
        if kind == 0:
            schema["additionalProperties"] = self._integer(0)
        elif kind == 1:
            schema["patternProperties"] = {"^p_[a-z]$": self._simple(0)}
            schema["additionalProperties"] = False
        elif kind > 2:  # at 2, anything may follow
            schema["additionalProperties"] = False
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._rng.randrange(3)
        if not self._rng.randrange(4):
            return {"type": "array", "prefixItems": [self._any(depth) for _ in range(least + 1)], "items": False}
        return {
            "type": "array", "items": self._any(depth), "minItems": least, "maxItems": least + self._rng.randrange(4),
        }  # fmt: skip

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randint(2, 3))]}

    def _ref(self, depth: int) -> Schema:
        name = f"d{len(self._defs)}"
        self._defs[name] = {}  # takes the name before a part of it does
        self._defs[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}

    def _tree(self, depth: int) -> Schema:
        children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        self._defs["tree"] = {
            "type": "object", "properties": {"v": {"type": "integer"}, "children": children}, "required": ["v"],
            "additionalProperties": False,
        }  # fmt: skip
        return {"$ref": "#/$defs/tree"}
