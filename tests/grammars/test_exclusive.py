"""How much is read to prove that the schemas of `oneOf` exclude each other."""

from typing import Any

from pipeline.grammars.simplified import simplified


class Names(list[str]):
    """Counts the names that were read."""

    num_read = 0

    def __iter__(self) -> Any:
        type(self).num_read += len(self)
        return super().__iter__()


def document(num_unions: int, num_names: int) -> dict[str, Any]:
    """Unions of the same two objects, which only the last of their required properties tells apart."""
    names = [f"p{i}" for i in range(num_names)]
    objects = {
        key: {"type": "object", "required": Names([*names, "kind"]), "properties": {"kind": {"const": key}}}
        for key in "AB"
    }
    union = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
    return {"$defs": objects, "properties": {f"u{i}": union for i in range(num_unions)}}


def test_a_document_with_many_unions_of_long_objects_is_read_a_bounded_number_of_times() -> None:
    """Each union read its objects again: 128 KiB took the checker 5 s, four times as long as 64 KiB."""
    Names.num_read = 0
    made = simplified(document(2000, 2000))
    assert Names.num_read < 2_000_000
    unions = [*made["properties"].values()]
    assert "anyOf" in unions[0] and "oneOf" in unions[-1]


def test_the_unions_of_an_ordinary_document_are_all_proven() -> None:
    made = simplified(document(200, 50))
    assert all("anyOf" in union for union in made["properties"].values())
