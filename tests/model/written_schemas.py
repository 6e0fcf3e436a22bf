"""JSON schemas written by hand, with texts that their grammars must accept and reject, or why they are refused.

Texts are in the form that a grammar writes: properties in the order of the schema, no escapes where none is needed, and
at most a space between tokens. A text that is rejected although the schema allows it has a note that says why.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Written:
    """A schema and what becomes of it.

    Attributes:
        name: Name of the case.
        schema: The schema, or its JSON where Python's values cannot say it.
        accepts: Texts that the grammar accepts.
        rejects: Texts that it does not.
        refused: Part of the message with which the schema is refused; "" for one that is not.
        note: Why a rejected text is valid all the same.
    """

    name: str
    schema: dict[str, Any] | str
    accepts: tuple[str, ...] = ()
    rejects: tuple[str, ...] = ()
    refused: str = ""
    note: str = ""


def case(name: str, schema: dict[str, Any] | str, accepts: list[str], rejects: list[str], note: str = "") -> Written:
    return Written(name, schema, tuple(accepts), tuple(rejects), note=note)


def no(name: str, schema: dict[str, Any] | str, says: str) -> Written:
    return Written(name, schema, refused=says)


def obj(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """Returns a schema of an object with these properties and no others."""
    asked = {"required": list(required)} if required else {}
    return {"type": "object", "properties": properties, **asked, "additionalProperties": False, **more}


def loose(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    """Returns a schema of an object that may have other properties."""
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {}), **more}


def arr(items: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "array", **({} if items is None else {"items": items}), **more}


def text(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def whole(**more: Any) -> dict[str, Any]:
    return {"type": "integer", **more}


def real(**more: Any) -> dict[str, Any]:
    return {"type": "number", **more}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def tree(root: str, **defs: Any) -> dict[str, Any]:
    return {**ref(root), "$defs": defs}


def digit(most: int = 9, least: int = 0) -> dict[str, Any]:
    return whole(minimum=least, maximum=most)


INT, STR, BOOL, NULL, NUM = whole(), text(), {"type": "boolean"}, {"type": "null"}, real()
ORDER = "properties come in the order of the schema"

OBJECTS = [
    case("empty object", obj({}), ["{}", "{ }"], ['{"a":1}', "[]", "", "{"]),
    case("any object", {"type": "object"}, ["{}", '{"a": [1, null]}'], ["[]", "1", '{"a"}']),
    case("optional ones", obj({"a": INT, "b": BOOL}), ["{}", '{"a": 1}', '{"b":true}', '{"a": 1, "b": false}'],
         ['{"a":"1"}', '{"c":1}', '{"a":1,}']),
    case("order", obj({"b": INT, "a": INT}), ['{"b":1,"a":2}'], ['{"a":2,"b":1}'], note=ORDER),
    case("all required", obj({"a": INT, "b": STR}, "a", "b"), ['{"a": 1, "b": "x"}'], ["{}", '{"a":1}', '{"b":"x"}']),
    case("last required", obj({"a": INT, "b": STR}, "b"), ['{"b":"x"}', '{"a": 1, "b": ""}'], ["{}", '{"a":1}']),
    case("middle required", obj({"a": NULL, "b": NULL, "c": NULL}, "b"),
         ['{"b":null}', '{"a":null,"b":null}', '{"b": null, "c": null}'], ['{"a":null,"c":null}', '{"c":null}']),
    case("required beside", loose({"a": INT}, "z"), ['{"z":2}', '{"a": 1, "z": []}', '{"z":1,"y":1}'],
         ['{"a":1}', "{}"]),
    case("three levels", obj({"a": obj({"b": obj({"c": digit(2)}, "c")}, "b")}, "a"), ['{"a": {"b": {"c": 1}}}'],
         ['{"a": {"b": {}}}', '{"a": {"b": {"c": 3}}}', '{"a": {}}', "{}"]),
    case("optional inside required", obj({"a": obj({"b": INT})}, "a"), ['{"a":{}}', '{"a":{"b":1}}'],
         ["{}", '{"a":1}']),
    case("objects side by side", obj({"x": obj({"n": INT}, "n"), "y": obj({"n": STR}, "n")}, "x", "y"),
         ['{"x":{"n":1},"y":{"n":"1"}}'], ['{"x":{"n":"1"},"y":{"n":1}}', '{"x":{"n":1}}']),
    case("list of objects", obj({"rows": arr(obj({"id": INT, "ok": BOOL}, "id"))}, "rows"),
         ['{"rows":[]}', '{"rows": [{"id": 1}, {"id": 2, "ok": true}]}'], ['{"rows":[{}]}', '{"rows":[{"ok":true}]}']),
    case("object of lists", obj({"a": arr(INT), "b": arr(STR)}), ['{"a":[1],"b":["x"]}'], ['{"a":["x"]}', '{"b":[1]}']),
    case("names beyond ASCII", obj({"é ü": INT, "日本": INT, "😀": INT}, "日本"), ['{"é ü": 1, "日本": 2, "😀": 3}'],
         ['{"é ü":1}', '{"日":1}']),
    case("names with escapes", obj({'q"': INT, "b\\": INT, "n\n": INT, "t\t/": INT}, 'q"'),
         [r'{"q\"":1}', r'{"q\"":1,"b\\":2,"n\n":3,"t\t/":4}'], ['{"q":1}', r'{"b\\":2}', r'{"q\"":1,"n":3}']),
    case("empty name", obj({"": INT}, ""), ['{"":1}'], ["{}", '{" ":1}']),
    case("names that begin alike", obj({"a": INT, "ab": STR, "abc": BOOL}), ['{"a":1,"ab":"","abc":true}', '{"ab":""}'],
         ['{"ab":1}', '{"abcd":1}', '{"a":true}']),
    case("names of keywords", obj({"type": STR, "$ref": INT, "enum": BOOL, "not": NULL}),
         ['{"type":"x","$ref":1,"enum":true,"not":null}'], ['{"not":1}', '{"$ref":"#"}']),
    case("forbidden property", obj({"a": False, "b": INT}), ["{}", '{"b":1}'], ['{"a":1}', '{"a":null,"b":1}']),
    case("property of any kind", obj({"a": True, "b": {}}), ['{"a":[{}]}', '{"a":null,"b":1.5e3}'],
         ['{"a"}', '{"c":1}']),
    case("others not asked", {"properties": {"a": INT}}, ["1", '"x"', "[]", '{"a":1}'], ['{"a":"x"}', "nul"]),
    case("needs no type", {"required": ["a"]}, ["1", '{"a":null}'], ["{}", '{"b":1}']),
    case("as many as required", loose({}, "a", "b", minProperties=2, maxProperties=2), ['{"a":1,"b":2}'],
         ['{"a":1}', "{}"]),
    case("many", obj({f"p{i}": INT for i in range(60)}, "p0", "p59"), ['{"p0":1,"p59":2}', '{"p0":1,"p30":5,"p59":2}'],
         ['{"p0":1}', '{"p0":1,"p60":2,"p59":2}']),
]  # fmt: skip

ADDITIONAL = [
    case("additional integers", {"type": "object", "additionalProperties": INT}, ["{}", '{"x": 1, "y": 2}'],
         ['{"x":"a"}', '{"x":1.5}', '{"x":null}']),
    case("beside a property", loose({"s": STR}, additionalProperties=INT), ['{"s":"a","n":1}', '{"n":1}'],
         ['{"s":1}', '{"n":"a"}', '{"s":"a","n":"a"}']),
    case("additional true", loose({"a": INT}, additionalProperties=True), ['{"a":1,"x":[]}', '{"x":{}}'],
         ['{"a":"no"}']),
    case("additional by default", loose({"a": INT}), ['{"a":1,"x":"y"}', '{"x":null}'],
         ['{"a":null}', '{"x":1,"a":"no"}']),
    case("property behind others", loose({"a": INT}), ['{"aa":1}'], ['{"x":2,"a":1}'], note=ORDER),
    case("map of maps", {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": BOOL}},
         ["{}", '{"a":{}}', '{"a": {"b": true}}'], ['{"a":true}', '{"a":{"b":1}}']),
    case("map of unions", {"type": "object", "additionalProperties": {"anyOf": [digit(), NULL]}}, ['{"a":1,"b":null}'],
         ['{"a":10}', '{"a":"1"}']),
    case("map with something", {"type": "object", "additionalProperties": INT, "minProperties": 1}, ['{"a":1}'],
         ["{}"]),
    case("map of at most two", {"type": "object", "additionalProperties": INT, "maxProperties": 2},
         ["{}", '{"a":1}', '{"a": 1, "b": 2}'], ['{"a":1,"b":2,"c":3}']),
    case("no property at all", {"type": "object", "maxProperties": 0}, ["{}"], ['{"a":1}']),
    case("patterns", {"type": "object", "patternProperties": {"^n_": INT, "^s_": STR}, "additionalProperties": False},
         ["{}", '{"n_a":1}', '{"s_b":"x","n_a":1}'], ['{"n_a":"x"}', '{"s_":1}', '{"q":1}']),
    case("patterns and others", {"type": "object", "patternProperties": {"^a": INT}, "additionalProperties": STR},
         ['{"a":1,"b":"x"}', '{"b":"x"}'], ['{"b":1}', '{"a":"x"}', '{"abc":"x"}']),
    case("pattern of digits", {"type": "object", "patternProperties": {"^[0-9]+$": BOOL},
         "additionalProperties": False},
         ['{"12":true}'], ['{"x":true}', '{"1x":true}', '{"":true}']),
    case("pattern anywhere", {"type": "object", "patternProperties": {"_id": INT}},
         ['{"a_id":1}', '{"b":"x"}', '{"_id_":0}'],
         ['{"a_id":"x"}', '{"_id_":null}']),
    case("every name", {"type": "object", "patternProperties": {".*": INT}}, ['{"x":1}', '{"":1}'],
         ['{"x":""}', '{"":""}']),
    case("pattern over a property", loose({"n_x": STR}, patternProperties={"^n_": {"maxLength": 3}}), ['{"n_x":"abc"}'],
         ['{"n_x":"abcd"}', '{"n_x":1}']),
    case("pattern and required", {"type": "object", "patternProperties": {"^n_": INT}, "required": ["n_1"]},
         ['{"n_1":1}'],
         ["{}", '{"n_1":"a"}', '{"n_2":1}']),
    case("forbidden names", {"type": "object", "patternProperties": {"^_": False}, "additionalProperties": INT},
         ['{"a":1}', "{}"], ['{"_a":1}', '{"_":null}']),
    case("pattern beyond ASCII", {"type": "object", "patternProperties": {"^é": INT}, "additionalProperties": False},
         ['{"éa":1}', '{"é":1}'], ['{"e":1}', '{"é":"x"}']),
    case("some of a pattern", {"type": "object", "patternProperties": {"^x[0-9]$": NULL}, "additionalProperties": False,
         "minProperties": 1, "maxProperties": 2}, ['{"x1":null}', '{"x1": null, "x2": null}'],
         ["{}", '{"x":null}', '{"x1":null,"x2":null,"x3":null}']),
]  # fmt: skip

NODE = obj({"v": digit(), "kids": arr(ref("node"), maxItems=2)}, "v")
REFERENCES = [
    case("a definition", tree("n", n=digit(2, 1)), ["1", "2"], ["0", "3", '"1"']),
    case("definitions", {"$ref": "#/definitions/n", "definitions": {"n": BOOL}}, ["true"], ["1", "null"]),
    case("two steps", tree("a", a=ref("b"), b=INT), ["1"], ['"a"', "null"]),
    case("bound beside", tree("n", n=INT) | {"maximum": 3, "minimum": 0}, ["3"], ["4", "-1", '"a"']),
    case("title beside", tree("n", n=INT) | {"title": "t", "description": "d"}, ["3"], ['"a"']),
    case("to a property", loose({"a": digit(), "b": {"$ref": "#/properties/a"}}), ['{"b":1}', '{"a":1,"b":2}'],
         ['{"b":"a"}']),
    case("deep pointer", {"$ref": "#/$defs/a/properties/b", "$defs": {"a": {"properties": {"b": {"enum": ["deep"]}}}}},
         ['"deep"'], ['"a"', "{}"]),
    case("pointer into a list", {"$ref": "#/$defs/a/anyOf/1", "$defs": {"a": {"anyOf": [INT, NULL]}}}, ["null"], ["1"]),
    case("pointer with escapes", {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": INT}}, ["1"], ['""']),
    case("pointer with percents", {"$ref": "#/$defs/a%20b", "$defs": {"a b": NULL}}, ["null"], ["1"]),
    case("anchor", {"$ref": "#here", "$defs": {"x": {"$anchor": "here", **NULL}}}, ["null"], ["1", '"a"']),
    case("identifier", {"$id": "https://a.example/s", "$ref": "https://a.example/s#/$defs/x", "$defs": {"x": INT}},
         ["1"],
         ['"a"']),
    case("anything", tree("x", x=True), ["1", "[{}]"], ["x"]),
    case("whole again", obj({"next": {"anyOf": [{"$ref": "#"}, NULL]}}, "next"),
         ['{"next":null}', '{"next":{"next": null}}'], ["{}", '{"next":{}}', "null"]),
    case("tree", tree("node", node=NODE), ['{"v":1}', '{"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}'],
         ['{"v":1,"kids":[{}]}', '{"kids":[]}', '{"v":1,"kids":[{"v":1},{"v":1},{"v":1}]}']),
    case("two that call each other", tree("a", a={"anyOf": [INT, arr(ref("b"), maxItems=2)]},
         b={"anyOf": [STR, arr(ref("a"), maxItems=1)]}), ["1", '["a", [1]]', "[[[]]]"], ["[1]", '"a"', '[["a"]]']),
    case("nested lists", tree("l", l=arr(ref("l"), maxItems=2)), ["[]", "[[], [[]]]"], ["[1]", "[[],[],[]]", "{}"]),
    case("expression", tree("e", e={"anyOf": [digit(), obj({"op": {"enum": ["+", "*"]}, "of": arr(ref("e"), minItems=2,
         maxItems=2)}, "op", "of")]}), ["1", '{"op":"+","of":[1,{"op":"*","of":[2,3]}]}'], ['{"op":"-","of":[1,2]}',
         '{"op":"+","of":[1]}', '{"of":[1,2]}']),
    case("any JSON", tree("j", j={"anyOf": [NULL, BOOL, NUM, STR, arr(ref("j")), {"type": "object",
         "additionalProperties": ref("j")}]}), ["null", '{"a": [1, {"b": "x"}]}'], ["[", "nil", '{"a":}', "[1,]"]),
    case("chain of optional", tree("c", c=obj({"name": text(maxLength=3), "in": ref("c")}, "name")),
         ['{"name":"a"}', '{"name":"a","in":{"name":"b"}}'], ['{"name":"a","in":{}}', '{"in":{"name":"b"}}']),
    case("used twice", obj({"from": ref("p"), "to": ref("p")}, "from", "to", **{"$defs": {"p": arr(digit(), minItems=2,
         maxItems=2)}}), ['{"from":[1,2],"to":[3, 4]}'], ['{"from":[1,2],"to":[3]}', '{"from":[1,2]}']),
    case("a property called $ref", obj({"$ref": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": INT}}), ['{"$ref":1}'],
         ['{"$ref":"a"}']),
]  # fmt: skip

CAT, DOG = (
    obj({"kind": {"const": "cat"}, "lives": digit()}, "kind"),
    obj({"kind": {"const": "dog"}, "good": BOOL}, "kind"),
)
COMBINED = [
    case("any of types", {"anyOf": [INT, STR]}, ["1", '"a"'], ["null", "1.5", "[]"]),
    case("any of nested", {"anyOf": [{"anyOf": [INT, NULL]}, STR]}, ["1", "null", '"a"'], ["true", "[]"]),
    case("any of overlapping", {"anyOf": [text(maxLength=2), text(pattern="^aaaa$")]}, ['"aa"', '"aaaa"'],
         ['"aaa"', '"bbbb"']),
    case("any of a bound", whole(anyOf=[{"maximum": 3}, {"minimum": 7}]), ["3", "-9", "7", "70"], ["5", "4", "6"]),
    case("any of and true", {"anyOf": [INT, True]}, ["1", '"a"'], ["x"]),
    case("any of and false", {"anyOf": [False, INT]}, ["1"], ['"a"']),
    case("any of objects", {"anyOf": [obj({"a": INT}, "a"), obj({"b": INT}, "b")]}, ['{"a":1}', '{"b":1}'],
         ["{}", '{"a":1,"b":1}', '{"c":1}']),
    case("any of required", obj({"a": INT, "b": INT}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
         ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'], ["{}", '{"c":1}']),
    case("optional as pydantic's", {"anyOf": [digit(5), NULL], "default": None}, ["null", "5"], ["6", '""']),
    case("one of types", {"oneOf": [INT, STR, NULL]}, ["1", '"a"', "null"], ["true", "{}"]),
    case("one of constants", {"oneOf": [{"const": "a", "title": "A"}, {"const": "b", "title": "B"}]}, ['"a"', '"b"'],
         ['"c"', '"A"']),
    case("one of objects by kind", {"oneOf": [CAT, DOG]}, ['{"kind":"cat","lives":9}', '{"kind":"dog","good":true}'],
         ['{"kind":"cat","good":true}', '{"kind":"cow"}', '{"lives":1}']),
    case("one of objects by name", {"oneOf": [obj({"a": INT}, "a"), obj({"b": INT}, "b")]}, ['{"a":1}', '{"b":1}'],
         ["{}", '{"a":1,"b":1}']),
    case("one of list and object", {"oneOf": [arr(INT), loose({"a": INT})]}, ["[1]", "{}"],
         ["1", '["a"]', '{"a":"x"}']),
    case("one of mixed", {"oneOf": [NULL, BOOL, {"enum": ["a"]}, {"const": 3}]}, ["3", "null", '"a"'], ["4", '"b"']),
    case("all of bounds", whole(allOf=[{"minimum": 3}, {"maximum": 11}, {"multipleOf": 2}]), ["4", "10"],
         ["2", "5", "12"]),
    case("all of objects", {"allOf": [loose({"a": INT}, "a"), loose({"b": STR}, "b")]},
         ['{"a":1,"b":"x"}', '{"a":1,"b":"x","c":2}'], ['{"a":1}', '{"b":"x"}', '{"a":1,"b":2}']),
    case("all of closed ones", {"allOf": [obj({"a": INT}), obj({"b": INT})]}, ["{}"], ['{"a":1}', '{"b":1}']),
    case("all of closed and open", {"allOf": [obj({"a": INT}), {"properties": {"a": {"minimum": 5}, "b": STR}}]},
         ["{}", '{"a":5}'], ['{"a":4}', '{"b":"x"}', '{"a":5,"b":"x"}']),
    case("all of types", {"allOf": [{"type": ["integer", "string"]}, {"type": ["string", "null"]}]}, ['"a"'],
         ["1", "null"]),
    case("all of lists", {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, ["2", "3"], ["1", "4"]),
    case("all of patterns", {"allOf": [text(pattern="^a"), {"pattern": "b$"}, {"maxLength": 3}]}, ['"ab"', '"axb"'],
         ['"a"', '"axxb"', '"b"']),
    case("all of arrays", {"allOf": [arr(digit(5)), arr({"minimum": 3}, minItems=1, maxItems=2)]}, ["[3]", "[4, 5]"],
         ["[]", "[2]", "[6]", "[3,3,3]"]),
    case("all of unions", {"allOf": [{"anyOf": [INT, STR]}, {"anyOf": [STR, NULL]}]}, ['"a"'], ["1", "null"]),
    case("all of with a reference", {"allOf": [ref("b"), obj({"b": INT, "a": STR})],
         "$defs": {"b": loose({"b": digit(3)},
         "b")}}, ['{"b":1}', '{"b":1,"a":"x"}'], ['{"b":4}', '{"a":"x"}', '{"b":1,"c":1}']),
    case("all of one", {"allOf": [ref("n")], "default": 1, "$defs": {"n": digit(3, 1)}}, ["1", "3"], ["0", "4"]),
]  # fmt: skip

FORM = "a number has one form here, without exponent and trailing zeros"
VALUES = [
    case("enum of texts", {"enum": ["red", "green"]}, ['"red"', '"green"'], ['"blue"', "red", '"Red"', '"re"']),
    case("enum of all types", {"enum": [1, 1.5, "1", True, None, [1, 2], {"a": 1, "b": [2]}]},
         ["1", "1.5", '"1"', "true", "null", "[1, 2]", '{"a": 1, "b": [2]}'],
         ["2", "false", "[2,1]", '{"a":1}', '"1.5"']),
    case("enum beyond ASCII", {"enum": ["ü", "日本", "😀", "e\u0301", "\u2028"]},
         ['"ü"', '"日本"', '"😀"', '"e\u0301"', '"\u2028"'], ['"u"', '"é"', '"日"']),
    case("enum with escapes", {"enum": ['a"b', "c\\d", "\n", "\b\f\r\t", "/", "</s>", ""]},
         [r'"a\"b"', r'"c\\d"', r'"\n"', r'"\b\f\r\t"', '"/"', '"</s>"', '""'], ['"a"', r'"\r"', '"n"', '" "']),
    case("no other escapes", {"enum": ["/", "ü"]}, ['"/"', '"ü"'], [r'"\/"', r'"\u00fc"', r'"\u002f"'],
         note="characters are not escaped without need"),
    case("enum that begins alike", {"enum": ["a", "ab", "abc"]}, ['"a"', '"ab"', '"abc"'], ['"abcd"', '""', '"b"']),
    case("enum of numbers", {"enum": [0, -1, 2.5, 100]}, ["0", "-1", "2.5", "100"], ["1", "-2.5", "10", "1000"]),
    case("enum and type", {"type": "string", "enum": ["a", 1, None]}, ['"a"'], ["1", "null"]),
    case("enum and integer", {"type": "integer", "enum": [1, 1.5, 2]}, ["1", "2"], ["1.5"]),
    case("enum and minimum", {"enum": [1, 2, 3, "x"], "minimum": 2}, ["2", "3", '"x"'], ["1"]),
    case("enum and length", {"enum": ["a", "bb", 7], "maxLength": 1}, ['"a"', "7"], ['"bb"']),
    case("enum and pattern", {"enum": ["a", "bb"], "pattern": "^b"}, ['"bb"'], ['"a"']),
    case("enum of booleans", {"enum": [True, 0]}, ["true", "0"], ["false", "1"]),
    case("enum of empty ones", {"enum": [[], [[]], {}, ""]}, ["[]", "[[]]", "{}", '""'], ["[{}]", "null", '{"a":1}']),
    case("enum that has null", {"type": ["string", "null"], "enum": ["a", None]}, ['"a"', "null"], ['"null"', '"b"']),
    case("enum of 300", {"enum": [f"word{i}" for i in range(300)]}, ['"word0"', '"word299"'], ['"word300"', '"word"']),
    case("constant text", {"const": "a b"}, ['"a b"'], ['"a"', '"ab"', '"a  b"']),
    case("constant null", {"const": None}, ["null"], ["0", '"null"', "false"]),
    case("constant false", {"const": False}, ["false"], ["0", "true", "null"]),
    case("constant object", {"const": {"k": [1, 2.5, "x", None, True], "o": {}}},
         ['{"k": [1, 2.5, "x", null, true], "o": {}}'], ['{"k":[1,2.5,"x",null,true]}', "{}"]),
    case("constant of another order", {"const": {"b": 1, "a": 2}}, ['{"b":1,"a":2}'], ['{"a":2,"b":1}'], note=ORDER),
    case("constant list", {"const": [[], [1], "a"]}, ['[[], [1], "a"]'], ["[]", '[[],[1],"b"]', '[[],[1],"a",1]']),
    case("constant 1.0", {"const": 1.0}, ["1"], ["1.0", "1e0"], note=FORM),
    case("constant 0.1", {"const": 0.1}, ["0.1"], ["0.10", "1e-1"], note=FORM),
    case("constant 1e-7", {"const": 1e-7}, ["0.0000001"], ["1e-7"], note=FORM),
    case("largest exact integer", {"const": 2**53 - 1}, [str(2**53 - 1)], [str(2**53), str(2**53 - 2)]),
]  # fmt: skip

FORMATS = [
    case("date", text(format="date"), ['"2024-02-29"', '"1999-12-31"'], ['"2024-02-30"', '"2023-04-31"', '"2024-13-01"',
         '"2024-1-1"', '"24-01-01"', '""', "20240101"]),
    case("time", text(format="time"), ['"12:00:00Z"', '"12:00:00.123+02:00"', '"00:00:00-23:59"'],
         ['"12:00:00"', '"24:00:00Z"', '"12:60:00Z"', '"12:00:61Z"', '"12:00Z"', '"12:00:00.Z"', '"12:00:00+25:00"']),
    case("date-time", text(format="date-time"), ['"2024-02-29T12:00:00Z"', '"1990-12-31T15:59:59-08:00"',
         '"2024-01-01t00:00:00.5z"'], ['"2024-02-30T12:00:00Z"', '"2024-01-01 12:00:00Z"', '"2024-01-01T12:00:00"',
         '"2024-01-01"']),
    case("duration", text(format="duration"), ['"P1D"', '"PT1H30M"', '"P1Y2M3DT4H5M6S"', '"P2W"', '"PT0S"'],
         ['"P"', '"PT"', '"P1WT1H"', '"P1.5D"', '"P1D2H"', '"1D"', '"P1D1Y"', '"p1d"']),
    case("uuid", text(format="uuid"), ['"123e4567-e89b-12d3-a456-426614174000"',
         '"123E4567-E89B-12D3-A456-426614174000"'],
         ['"123e4567e89b12d3a456426614174000"', '"123e4567-e89b-12d3-a456-42661417400g"', '"123e4567"']),
    case("email", text(format="email"), ['"a@b.c"', '"a.b+c@d-e.example"', '"a@b.co.uk"'],
         ['"@b.c"', '"a..b@c.d"', '"a b@c.d"', '"a@b@c"', '"a@"', '"a@-b.c"', '"a"']),
    case("rare email", text(format="email"), ['"a_b@c.d"'], [r'"\"a b\"@c.d"', '"a@[127.0.0.1]"', '"a@b"'],
         note="quotes, addresses of hosts and names without a dot are not written"),
    case("ipv4", text(format="ipv4"), ['"1.2.3.4"', '"0.0.0.0"', '"255.255.255.255"'],
         ['"256.1.1.1"', '"01.2.3.4"', '"1.2.3"', '"1.2.3.4.5"', '"1.2.3.4/8"']),
    case("ipv6", text(format="ipv6"), ['"::"', '"::1"', '"1:2:3:4:5:6:7:8"', '"FE80::ABCD"', '"1:2:3:4:5:6:7::"'],
         ['"1::2::3"', '"12345::"', '":::"', '"g::"', '"1:2:3:4:5:6:7:8:9"', '"fe80::1%eth0"', '"1:2:3:4:5:6:7"']),
    case("ipv6 with ipv4", text(format="ipv6"), ['"::ffff:102:304"'], ['"::ffff:1.2.3.4"'],
         note="an address of version 4 inside is not written"),
    case("hostname", text(format="hostname"), ['"a.example"', '"a-b.c"', '"A.B"', '"xn--nxasmq6b"', '"1"',
         f'"{"a" * 63}"'],
         ['"-a.b"', '"a-"', '"a_b"', '"a..b"', '""', '"ü.de"', f'"{"a" * 64}"']),
    case("uri", text(format="uri"), ['"http://a.b/c?d=e#f"', '"mailto:a@b"', '"urn:x:y"', '"http://[::1]:80/"',
         '"file:///x"'],
         ['"a"', '"//a/b"', '"http://a b"', '"http://a/%zz"', '"http://a:b"', '"1http://a"', '"http://[::1"',
         '"http://a/ü"']),
    case("unknown as a name", text(format="unknown"), ['"a"', '""'], ["1"]),
    case("format and pattern", text(format="date", pattern="^2024"), ['"2024-01-01"'], ['"2023-01-01"', '"2024"']),
    case("format and length", text(format="ipv4", maxLength=7), ['"1.2.3.4"'], ['"10.2.3.4"']),
    case("format without type", {"format": "date"}, ['"2024-01-01"', "1", "null"], ['"x"']),
    case("format of a number", whole(format="int32"), ["1", "99999999999"], ['"1"', "1.5"]),
    case("format or null", {"anyOf": [text(format="date"), NULL]}, ['"2024-01-01"', "null"], ['"x"', '"null"']),
    case("formats in an object", obj({"id": text(format="uuid"), "ip": text(format="ipv4")}, "ip"),
         ['{"ip":"1.2.3.4"}'],
         ['{"ip":"1.2.3"}', '{"id":"x","ip":"1.2.3.4"}']),
]  # fmt: skip

PLAIN = "with bounds or multipleOf numbers have no exponents, and no zeros behind the last digit of a bound"
NUMBERS = [
    case("integer", INT, ["0", "-0", "7", "-12", "1" + 40 * "0"], ["01", "1.5", "+1", "--1", '"1"', "1e3x", ""]),
    case("integer with a point", INT, ["1"], ["1.0", "1e3"], note="integers are written without points and exponents"),
    case("number", NUM, ["0", "-0.0", "1.50", "1e3", "1E+5", "2.5e-3"],
         ["01", ".5", "5.", "1e", "+1", "NaN", "Infinity"]),
    case("byte", digit(255), ["0", "9", "255", "199"], ["-1", "256", "300", "1000", "00"]),
    case("signed byte", whole(minimum=-128, maximum=127), ["-128", "0", "127", "-1"], ["-129", "128", "1.5"]),
    case("port", digit(65535, 1), ["1", "65535", "8080"], ["0", "65536", "99999"]),
    case("positive", whole(exclusiveMinimum=0), ["1", "10"], ["0", "-1", "-0"]),
    case("negative", whole(exclusiveMaximum=0), ["-1", "-10"], ["0", "1"]),
    case("exclusive both", whole(exclusiveMinimum=10, exclusiveMaximum=13), ["11", "12"], ["10", "13"]),
    case("the narrower bound", whole(minimum=5, exclusiveMinimum=5, maximum=9, exclusiveMaximum=8), ["6", "7"],
         ["5", "8"]),
    case("bounds between integers", whole(minimum=-2.5, maximum=2.5), ["-2", "0", "2"], ["-3", "3"]),
    case("from 32 bits on", whole(minimum=2**31), [str(2**31), str(2**40)], [str(2**31 - 1), "0", "-1"]),
    case("to 15 digits", whole(minimum=-(10**15), maximum=10**15), [str(10**15), str(-(10**15))],
         [str(10**15 + 1), str(-(10**15) - 1)]),
    case("to the largest exact one", whole(maximum=2**53 - 1), [str(2**53 - 1), "-5"], [str(2**53), str(10**17)]),
    case("multiples of 7", whole(multipleOf=7), ["0", "7", "-7", "70000"], ["8", "1", "-20", "7.5"]),
    case("multiples in a range", whole(multipleOf=7, minimum=-20, maximum=20), ["-14", "0", "7"], ["21", "-21", "3"]),
    case("multiples of 1.5", whole(multipleOf=1.5), ["3", "0", "6"], ["1", "2", "1.5"]),
    case("multiples of 2 and 3", {"allOf": [whole(multipleOf=2), {"multipleOf": 3}]}, ["6", "12"], ["4", "3"]),
    case("multiples of 0.5", real(multipleOf=0.5), ["0.5", "-1", "2.0"], ["0.3", "0.25", "1.2"]),
    case("cents", real(multipleOf=0.01, minimum=0, maximum=100), ["0.25", "1", "99.99", "100"],
         ["0.333", "100.01", "-0.01"]),
    case("tenths", real(multipleOf=0.1, minimum=0, maximum=1), ["0.3", "0", "1"], ["0.35", "1.1"]),
    case("multiples without type", {"multipleOf": 2}, ["2", '"a"', "null"], ["3", "2.5"]),
    case("share", real(minimum=0, maximum=1), ["0", "0.5", "1", "1.0"], ["1.1", "-0.1", "2", "1.0001"]),
    case("share of other forms", real(minimum=0, maximum=0.5), ["0.5", "0.25"], ["5e-1", "0.500"], note=PLAIN),
    case("share without ends", real(exclusiveMinimum=0, exclusiveMaximum=1), ["0.5", "0.0001", "0.9999"],
         ["0", "0.0", "1", "1.0", "-0.5"]),
    case("one end", real(minimum=0, exclusiveMaximum=1), ["0", "0.999999"], ["1", "1.0", "-0.1"]),
    case("around zero", real(minimum=-1.5, maximum=1.5), ["-1.5", "1.5", "0", "-0.25"], ["-1.51", "1.51", "-2", "15"]),
    case("latitude", real(minimum=-90, maximum=90), ["-90", "52.52", "90.0", "0"], ["90.1", "-91", "900"]),
    case("small bounds", real(minimum=0.001, maximum=0.01), ["0.001", "0.005", "0.01"], ["0.0009", "0.011", "0", "1"]),
    case("tiny bound", real(minimum=0, maximum=1e-10), ["0", "0.0000000001"], ["0.0000000002", "1"]),
    case("decimal bounds", real(minimum=0.1, maximum=0.3), ["0.1", "0.2", "0.3"],
         ["0.31", "0.09", "0.300000000000000001"]),
    case("from a million on", real(minimum=1e6), ["1000000", "1000000.5"], ["999999", "-1000000", "999999.9"]),
    case("bound without type", {"minimum": 3}, ["3", "4.5", '"x"', "null"], ["2", "-3"]),
]  # fmt: skip

TEXTS = [
    case("text", STR, ['""', '"a"', r'"\n\"\\"', '"é😀"', '"/"'], ["a", '"', '"\n"', r'"\x"', r'"\u00e9', "1"]),
    case("no \\u", STR, ['"a"'], [r'"\u0061"', r'"\u00e9"'], note="with \\u a name could hide from the schema"),
    case("lengths", text(minLength=2, maxLength=3), ['"ab"', '"abc"'], ['"a"', '"abcd"', '""']),
    case("lengths in characters", text(minLength=2, maxLength=2), ['"éé"', '"😀😀"', r'"\n\""'],
         ['"😀"', '"ééé"', r'"\n"']),
    case("empty", text(maxLength=0), ['""'], ['" "', '"a"']),
    case("at least", text(minLength=3), ['"abc"', '"abcdef"'], ['"ab"', '""']),
    case("length without type", {"minLength": 2}, ['"ab"', "1", "[]"], ['"a"']),
    case("pattern", text(pattern="^[A-Z]{2}-[0-9]{4}$"), ['"AB-1234"'], ['"ab-1234"', '"AB-123"', '"xAB-1234"']),
    case("pattern within", text(pattern="b"), ['"abc"', '"b"'], ['"ac"', '""']),
    case("pattern at the front", text(pattern="^ab"), ['"ab"', '"abc"'], ['"xab"', '"a"']),
    case("pattern at the end", text(pattern="ab$", maxLength=5), ['"ab"', '"xab"'], ['"abx"', '"b"']),
    case("pattern of alternatives", text(pattern="^(a|b)+c$", maxLength=5), ['"ac"', '"ababc"'], ['"c"', '"ababbc"']),
    case("anchors of alternatives", text(pattern="a|^b$"), ['"xay"', '"b"'], ['"xb"', '"bb"']),
    case("pattern and lengths", text(pattern="^[a-z]+$", minLength=2, maxLength=3), ['"ab"'],
         ['"a"', '"abcd"', '"AB"']),
    case("digits of ASCII", text(pattern=r"^[0-9]\d$"), ['"12"'], ['"1"', '"1a"', '"123"']),
    case("words", text(pattern=r"^\w+@\w+$"), ['"a_1@b"'], ['"a b@c"', '"@b"', '"a@"']),
    case("spaces", text(pattern=r"^a\sb$"), ['"a b"', r'"a\nb"', r'"a\tb"'], ['"ab"', '"a-b"']),
    case("any character", text(pattern="^a.b$"), ['"axb"', r'"a\"b"', '"a😀b"'], [r'"a\nb"', '"ab"', '"axxb"']),
    case("pattern with escapes", text(pattern=r'^"\\\/$'), [r'"\"\\/"'], [r'"\"\\"', '"x"']),
    case("other than", text(pattern="^[^a]$"), ['"b"', r'"\n"', '"é"'], ['"a"', '""', '"bb"']),
    case("letters of Unicode", text(pattern=r"^[à-ÿ]+$"), ['"éü"'], ['"e"', '"1"']),
    case("pattern in \\u", text(pattern="^\\u0041$"), ['"A"'], ['"u"', r'"\u0042"']),
    case("counted groups", text(pattern="^(?:ab){2,3}$"), ['"abab"', '"ababab"'], ['"ab"', '"abababab"', '"aba"']),
    case("optional sign", text(pattern=r"^-?\d+(\.\d{1,2})?$"), ['"-1.25"', '"7"'], ['"1.234"', '"."', '"+1"']),
    case("empty pattern", text(pattern="", maxLength=2), ['""', '"ab"'], ['"abc"']),
]  # fmt: skip

ARRAYS = [
    case("any list", arr(), ["[]", '[1, "a", [null]]'], ["{}", "[1,]", "[", "[1 2]"]),
    case("list of integers", arr(INT), ["[]", "[1,2]", "[1, 2]"], ['["a"]', "[1.5]", "[null]", "[,]"]),
    case("space", arr(NULL), ["[ ]", "[ null ]", "[null ,null]", "[\n  null\n]"], ["[  ]", "[\tnull]", "[\r]"],
         note="between tokens there is a space, or a new line and its indentation"),
    case("counts", arr(INT, minItems=1, maxItems=2), ["[1]", "[1, 2]"], ["[]", "[1,2,3]"]),
    case("exact count", arr({"enum": [1, 2]}, minItems=2, maxItems=2), ["[1,2]"], ["[1]", "[1,3]", "[1,2,1]"]),
    case("only empty", arr(maxItems=0), ["[]"], ["[1]", "[null]"]),
    case("no items", arr(False), ["[]"], ["[1]"]),
    case("at least one", arr(BOOL, minItems=1), ["[true]", "[true, false, true]"], ["[]", "[1]"]),
    case("tuple", arr(False, prefixItems=[digit(), text(maxLength=2)], minItems=2), ['[1, "a"]'],
         ["[]", "[1]", '["a",1]', '[1,"a",2]']),
    case("tuple that may end", arr(False, prefixItems=[digit(), STR]), ["[]", "[1]", '[1,"a"]'],
         ['["a"]', '[1,"a",1]']),
    case("tuple that goes on", arr(prefixItems=[digit(), STR]), ["[1]", '[1,"a",null,{}]'], ['["a"]', "[1,1]"]),
    case("tuple and rest", arr(BOOL, prefixItems=[digit()], minItems=2, maxItems=3), ["[1,true]", "[1, true, false]"],
         ["[1]", "[1,1]", "[1,true,true,true]"]),
    case("list of lists", arr(arr(arr(NULL, maxItems=1), maxItems=1)), ["[]", "[[], [[null]]]"],
         ["[[[[]]]]", "[null]"]),
    case("matrix", arr(arr(digit(), minItems=2, maxItems=2), minItems=2, maxItems=2), ["[[1, 2], [3, 4]]"],
         ["[[1,2]]", "[[1,2],[3]]", "[1,2,3,4]"]),
    case("list of unions", arr({"anyOf": [digit(), text(maxLength=1), NULL]}, maxItems=3), ['[1, "a", null]'],
         ["[10]", '["ab"]', "[1,1,1,1]"]),
    case("count without type", {"minItems": 1}, ["[1]", "1", '""'], ["[]"]),
    case("twenty", arr(digit(), minItems=20, maxItems=20), ["[" + ",".join("7" * 20) + "]"],
         ["[" + ",".join("7" * 19) + "]"]),
]  # fmt: skip

TYPES = [
    case("anything at all", {}, ["1", '"a"', "null", '[1, {"a": null}]'], ["nul", "", "'a'", "True"]),
    case("boolean", BOOL, ["true", "false"], ["True", "1", "null", '"true"']),
    case("null", NULL, ["null"], ["None", "0", '""', "nil"]),
    case("integer or null", {"type": ["integer", "null"]}, ["1", "null"], ['"a"', "1.5"]),
    case("object or list", {"type": ["object", "array"]}, ["{}", "[]"], ["1", "null"]),
    case("all but object", {"type": ["string", "number", "boolean", "null", "array"]}, ["1.5", '"a"', "[]"], ["{}"]),
    case("integer or number", {"type": ["integer", "number"]}, ["1.5", "1"], ['"1"']),
    case("keywords by type", {"type": ["string", "integer"], "maxLength": 2, "minimum": 3}, ['"ab"', "3"],
         ['"abc"', "2"]),
    case("nullable text", {"type": ["string", "null"], "maxLength": 4}, ['"null"', "null"], ['"abcde"', "nul"]),
    case("annotations", {"title": "t", "description": "d\n\x01", "default": 1, "examples": [1, "x"], "$comment": "c",
         "deprecated": True, "readOnly": True, "writeOnly": False, "enum": [5]}, ["5"], ["1", '"x"']),
    case("default is no constraint", obj({"a": digit() | {"default": "none"}}), ["{}", '{"a":1}'], ['{"a":"none"}']),
    case("unknown keywords", whole(**{"x-order": 1, "discriminator": {"propertyName": "k"}, "divisibleBy": 2}), ["3"],
         ['"a"']),
    case("nullable of OpenAPI", whole(nullable=True), ["1"], ["null"]),
    case("dialect", {"$schema": "https://json-schema.org/draft/2020-12/schema", **INT}, ["1"], ["null"]),
    case("content", text(contentEncoding="base64", contentMediaType="image/png"), ['"a"'], ["1"]),
]  # fmt: skip

PLACE = loose({"city": {"maxLength": 20, "title": "City", "type": "string"}, "lat": real(minimum=-90, maximum=90,
         title="Lat"),
               "unit": {**ref("Unit"), "default": "c"}, "when": {"anyOf": [text(format="date"), NULL],
         "default": None}},
              "city", "lat", title="Place", description="A place.")  # fmt: skip
UNIT = {"enum": ["c", "f"], "title": "Unit", "type": "string"}
PETS = {"Cat": loose({"kind": {"const": "cat", **STR}, "lives": digit()}, "kind", "lives"),
        "Dog": loose({"kind": {"const": "dog", **STR}, "good": BOOL | {"default": True}}, "kind")}  # fmt: skip
CHOICE = {"discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
          "oneOf": [ref("Cat"), ref("Dog")]}  # fmt: skip
TOOLS = [
    case("model with an enum", {**PLACE, "$defs": {"Unit": UNIT}}, ['{"city":"Rome","lat":41.9}',
         '{"city": "Rome", "lat": 41.9, "unit": "f", "when": null}'], ['{"city":"Rome"}', '{"city":"Rome","lat":91}',
         '{"city":"Rome","lat":1,"unit":"k"}', '{"city":"Rome","lat":1,"when":"today"}']),
    case("choice of models", loose({"pet": CHOICE}, "pet", **{"$defs": PETS}),
         ['{"pet":{"kind":"cat","lives":9}}', '{"pet":{"kind":"dog"}}'],
         ['{"pet":{"kind":"cat"}}', '{"pet":{"kind":"cow"}}']),
    case("model that has itself", tree("Own", Own=loose({"n": INT, "next": {"anyOf": [ref("Own"), NULL],
         "default": None}}, "n")),
         ['{"n":1}', '{"n":1,"next":{"n":2,"next":null}}'], ['{"next":null}', '{"n":1,"next":{}}', '{"n":1,"next":1}']),
    case("model of containers", loose({"xs": arr(prefixItems=[INT, STR], minItems=2, maxItems=2, title="Xs"),
         "m": {"additionalProperties": INT, "default": {}, "type": "object"}, "tags": arr(STR, default=[])}, "xs"),
         ['{"xs":[1,"a"]}', '{"xs":[1,"a"],"m":{"k":1},"tags":["t"]}'],
         ['{"xs":[1]}', '{"xs":[1,"a"],"m":{"k":"1"}}', "{}"]),
    case("model of other types", obj({"id": text(format="uuid"), "took": text(format="duration"),
         "price": {"anyOf": [NUM, text(pattern=r"^\d+(\.\d+)?$")]}}, "price"),
         ['{"price":1.5}', '{"took":"PT1S","price":"2.50"}'],
         ['{"price":"x"}', '{"took":"1s","price":1}', '{"id":"7","price":1}']),
    case("strict function", obj({"location": text(description="City and country"), "unit": {"type": ["string", "null"],
         "enum": ["c", "f", None]}}, "location", "unit"), ['{"location":"Oslo","unit":null}'], ['{"location":"Oslo"}',
         '{"location":"Oslo","unit":"k"}']),
    case("function without arguments", obj({}, **{"$schema": "http://json-schema.org/draft-07/schema#"}), ["{}"],
         ['{"a":1}']),
    case("query with filters", obj({"where": arr(obj({"field": {"enum": ["age", "name"]}, "op": {"enum": ["=", "<",
         ">"]},
         "value": {"type": ["string", "number"]}}, "field", "op", "value")), "limit": digit(100, 1)}, "where"),
         ['{"where":[]}', '{"where":[{"field":"age","op":">","value":3}],"limit":10}'],
         ['{"where":[{"field":"age","op":"~"}]}',
         '{"where":[],"limit":0}', '{"where":[{"field":"age","op":">","value":null}]}']),
    case("edit of a file", obj({"path": text(pattern="^/"), "edits": arr(obj({"line": whole(minimum=1), "text": STR},
         "line",
         "text"), minItems=1)}, "path", "edits"), [r'{"path":"/a","edits":[{"line":1,"text":"x = \"1\"\n"}]}'],
         ['{"path":"a","edits":[{"line":1,"text":""}]}', '{"path":"/a","edits":[]}',
         '{"path":"/a","edits":[{"line":0,"text":""}]}']),
    case("steps and answer", obj({"steps": arr(obj({"explanation": STR, "output": STR}, "explanation", "output")),
         "final_answer": STR}, "steps", "final_answer"),
         ['{"steps":[{"explanation":"e","output":"o"}],"final_answer":"a"}'],
         ['{"final_answer":"a"}', '{"steps":[{"output":"o"}],"final_answer":"a"}']),
]  # fmt: skip

UNKNOWN = 'Unimplemented keys: ["{}"]'
ONE_OF = "oneOf constraints are not supported"
REFUSED = [
    no("not", {"not": INT}, UNKNOWN.format("not")),
    no("if", obj({"a": {"if": INT, "then": {"minimum": 1}}}), 'Unimplemented keys: ["if", "then"]'),
    no("uniqueItems", arr(INT, uniqueItems=True), UNKNOWN.format("uniqueItems")),
    no("contains", arr(contains=INT), UNKNOWN.format("contains")),
    no("propertyNames", {"type": "object", "propertyNames": {"maxLength": 3}}, UNKNOWN.format("propertyNames")),
    no("dependentRequired", {"dependentRequired": {"a": ["b"]}}, UNKNOWN.format("dependentRequired")),
    no("dependentSchemas", {"dependentSchemas": {"a": {}}}, UNKNOWN.format("dependentSchemas")),
    no("unevaluatedProperties", loose({}, unevaluatedProperties=False), UNKNOWN.format("unevaluatedProperties")),
    no("unevaluatedItems", arr(unevaluatedItems=False), UNKNOWN.format("unevaluatedItems")),
    no("dynamic reference", {"$dynamicRef": "#a"}, UNKNOWN.format("$dynamicRef")),
    no("one of numbers", {"oneOf": [INT, NUM]}, ONE_OF),
    no("one of overlapping lists", {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, ONE_OF),
    no("one of open objects", {"oneOf": [loose({"a": INT}, "a"), loose({"b": INT}, "b")]}, ONE_OF),
    no("unknown format", text(format="iri"), "Unknown format: iri"),
    no("format of a reference", obj({"a": text(format="uri-reference")}, "a"), "Unknown format: uri-reference"),
    no("unknown type", {"type": "any"}, "Invalid type: any"),
    no("look-around", text(pattern="^(?=a)b"), "look-around"),
    no("word boundary", text(pattern=r"\bfoo\b"), "lookarounds not supported"),
    no("back reference", text(pattern=r"^(a)\1$"), "backreferences are not supported"),
    no("broken pattern", text(pattern="["), "unclosed character class"),
    no("patterns that overlap", {"patternProperties": {"^n_": INT, "a$": STR}}, "are not disjoint"),
    no("reference elsewhere", {"$ref": "https://a.example/b.json"}, "not present in a registry"),
    no("reference to nothing", {"$ref": "#/$defs/x"}, "does not exist"),
    no("reference to itself", tree("a", a=ref("a")), "it allows no text"),
    no("empty range", digit(2, 3), "minimum (3) is greater than maximum (2)"),
    no("empty lengths", text(minLength=3, maxLength=2), "minLength (3) is greater than maxLength (2)"),
    no("empty counts", arr(minItems=2, maxItems=1), "minItems (2) is greater than maxItems (1)"),
    no("no value", {"enum": []}, "anyOf is empty"),
    no("types that exclude each other", {"allOf": [INT, STR]}, "incompatible types"),
    no("required and forbidden", obj({"a": INT}, "z"), "required property 'z' is unsatisfiable"),
    no("more than required", {"type": "object", "minProperties": 2}, "/minProperties: can be at most"),
    no("fewer than listed", loose({"a": INT}, maxProperties=1), "min/maxProperties only supported"),
    no("draft 4", {"minimum": 3, "exclusiveMinimum": True}, "/exclusiveMinimum: must be a number"),
    no("older dialect", {"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema: "),
    no("control character", {"enum": ["a\x01"]}, "control characters"),
    no("wide range", whole(minimum=10**18), "cannot be kept exactly"),
    no("length as a text", text(maxLength="3"), "Expected positive integer for 'maxLength'"),
    no("text for a schema", {"items": "integer"}, "schema must be an object or boolean"),
    no("half of a pair", r'{"const": "\ud800"}', "lone surrogate"),
    no("NaN", '{"minimum": NaN}', "NaN is no number of JSON"),
]  # fmt: skip

LARGE = "cannot be kept exactly"
NARROWED = [
    case("leap day", text(format="date"), ['"2024-02-29"', '"2000-02-29"'], ['"2023-02-29"', '"1900-02-29"']),
    case("leap day of a time", text(format="date-time"), ['"2024-02-29T00:00:00Z"'], ['"2023-02-29T00:00:00Z"']),
    case("no leap second", text(format="time"), ['"23:59:59Z"'], ['"12:00:60Z"', '"23:59:60Z"'],
         note="no minute has a second 60: most have none"),
    case("long hostname", text(format="hostname"), ['"a"'], [f'"{".".join(["a" * 60] * 5)}"']),
    case("long local part", text(format="email"), ['"a@b.c"'], [f'"{"a" * 65}@b.c"']),
    case("date and pattern", text(format="date", pattern="^19"), ['"1999-12-31"'], ['"2024-12-31"', '"1900-02-29"']),
    no("bound of 16 digits", whole(minimum=2**53, maximum=2**53 + 3), LARGE),
    no("constant of 16 digits", {"const": 2**53 + 1}, LARGE),
    no("identifier in an enum", {"enum": [1234567890123456789]}, LARGE),
    no("number in a list of a constant", {"const": [[2**60]]}, LARGE),
    no("fraction of 17 digits", {"const": 123456789.12345679}, LARGE),
    no("multiples of a billion", whole(multipleOf=10**9), "multipleOf: can be at most"),
    no("constant out of range", '{"const": 1e400}', LARGE),
    no("bound of 21 digits", whole(maximum=10**20), LARGE),
    case("long default", whole(default=10**20, minimum=0), ["1"], ["-1"]),
    no("smallest of 64 bits", {"const": -(2**63)}, LARGE),
    no("constant of 17 digits", {"const": 0.30000000000000004}, LARGE),
    no("constant 1e22", {"const": 1e22}, LARGE),
]  # fmt: skip

SCHEMAS = [
    *OBJECTS, *ADDITIONAL, *REFERENCES, *COMBINED, *VALUES, *FORMATS, *NUMBERS, *TEXTS, *ARRAYS, *TYPES, *TOOLS,
    *REFUSED, *NARROWED,
]  # fmt: skip
