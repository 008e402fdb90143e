// Schemas of zod 3 and 4 and TypeBox as their users send them, with texts that they allow and refuse.
//
//   npm install zod@4 zod3@npm:zod@3 zod-to-json-schema@3 @sinclair/typebox typebox
//   node javascript_schemas.mjs > javascript_schemas.json
//
// A case is a schema of some libraries, with texts that it allows and texts that it doesn't. The libraries themselves judge
// the texts where they can, and this fails if one disagrees.
import { readFileSync } from "node:fs";
import * as z4 from "zod";
import * as z3 from "zod3";
import { zodToJsonSchema } from "zod-to-json-schema";
import { FormatRegistry, Type as T34 } from "@sinclair/typebox";
import { Value as Value34 } from "@sinclair/typebox/value";
import { Type as T1 } from "typebox";
import { Value as Value1 } from "typebox/value";

for (const format of ["email", "date-time", "date", "time", "uuid", "uri", "ipv4", "ipv6"])
  FormatRegistry.Set(format, () => true);

const LIBRARIES = {
  "zod 3": { z: z3.z, judge: (schema, value) => schema.safeParse(value).success, write: (schema, options) => zodToJsonSchema(schema, options) },
  "zod 4": { z: z4.z, judge: (schema, value) => schema.safeParse(value).success, write: (schema, options) => z4.z.toJSONSchema(schema, options) },
  "TypeBox 0.34": { z: T34, judge: (schema, value) => Value34.Check(schema, value), write: (schema) => schema },
  "TypeBox 1": { z: T1, judge: (schema, value) => Value1.Check(schema, value), write: (schema) => schema },
};
const ZOD = ["zod 3", "zod 4"], TYPEBOX = ["TypeBox 0.34", "TypeBox 1"];
const ALL = [];

// One builder for several libraries. What is built is a field of an object, as in almost all requests.
function add(libraries, name, good, bad, build, options = {}) {
  for (const library of libraries) {
    const { z, judge, write } = LIBRARIES[library];
    const object = library.startsWith("zod") ? (one) => z.object({ v: one }) : (one) => z.Object({ v: one });
    const schema = options.root ? build(z) : object(build(z));
    const wrapped = options.root ? (text) => text : (text) => `{"v": ${text}}`;
    const texts = { good: good.map(wrapped), bad: bad.map(wrapped) };
    for (const [kind, list] of Object.entries(texts))
      for (const text of list)
        if (!options.unjudged && judge(schema, JSON.parse(text)) !== (kind === "good"))
          throw new Error(`${library}, ${name}: ${text} is not ${kind}`);
    const { $schema: _, ...written } = JSON.parse(JSON.stringify(write(schema, options.write?.[library] ?? options.writeAll), (_, one) => (typeof one === "bigint" ? Number(one) : one)));
    ALL.push({ library, name, ...texts, schema: written });
  }
}
const zod = (...rest) => add(ZOD, ...rest), zod3 = (...rest) => add(["zod 3"], ...rest), zod4 = (...rest) => add(["zod 4"], ...rest);
const box = (...rest) => add(TYPEBOX, ...rest);
const SENT = { unjudged: true }; // what JSON can't have, such as dates, or what the schema does not say

// Strings
zod("string", ['"a"', '""'], ["1", "null"], (z) => z.string());
zod("length", ['"ab"'], ['""', '"abc"'], (z) => z.string().min(1).max(2));
zod("one length", ['"abc"'], ['"ab"'], (z) => z.string().length(3));
zod("nonempty", ['"a"'], ['""'], (z) => z.string().nonempty());
zod("pattern", ['"AB-12"'], ['"ab-12"'], (z) => z.string().regex(/^[A-Z]{2}-\d+$/));
zod("pattern that is not anchored", ['"a foo b"'], ['"a bar b"'], (z) => z.string().regex(/foo/));
zod("pattern with a slash", ['"a/b"'], ['"a:b"'], (z) => z.string().regex(/^\w\/\w$/));
zod("pattern of letters", ['"aü"'], ['"a1"'], (z) => z.string().regex(/^\p{L}+$/u));
zod3("pattern without case", ['"ABC"'], ['"abd"'], (z) => z.string().regex(/^abc$/i), { writeAll: { applyRegexFlags: true } });
zod("pattern that looks ahead", ['"a1"'], ['"a"'], (z) => z.string().regex(/^(?=.*\d).+$/));
zod("two patterns", ['"ab1"'], ['"ab"', '"1"'], (z) => z.string().regex(/^a/).regex(/1$/));
zod("beginning and end", ['"a-b"'], ['"a-c"'], (z) => z.string().startsWith("a").endsWith("b"));
zod("part", ['"xa.cy"'], ['"xabcy"'], (z) => z.string().includes("a.c"));
zod("changed strings", ['"a"'], ["1"], (z) => z.string().trim().toLowerCase());
zod("email", ['"a@b.de"'], ['"a"'], (z) => z.string().email());
zod("url", ['"https://a.de/b"'], ['"a b"'], (z) => z.string().url());
zod("uuid", ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123"'], (z) => z.string().uuid());
zod("datetime", ['"2026-11-29T12:00:00Z"'], ['"2026-11-29"'], (z) => z.string().datetime());
zod("datetime with an offset", ['"2026-11-29T12:00:00+01:00"'], ['"2026-11-29"'], (z) => z.string().datetime({ offset: true }));
zod("date string", ['"2026-11-29"'], ['"29.11.2026"'], (z) => z.string().date());
zod3("time string", ['"12:00:00Z"'], ['"noon"'], (z) => z.string().time(), SENT); // JSON Schema's times have a zone
zod4("time string", ['"12:00:00"'], ['"noon"'], (z) => z.string().time());
zod("duration", ['"P1D"'], ['"1 day"'], (z) => z.string().duration());
zod("ip", ['"10.0.0.1"'], ['"10.0.0"'], (z) => (z.ipv4 ? z.ipv4() : z.string().ip({ version: "v4" })));
zod3("ip of both versions", ['"10.0.0.1"', '"::1"'], ['"10.0.0"'], (z) => z.string().ip());
zod4("ipv6", ['"::1"'], ['"10.0.0.1"'], (z) => z.ipv6());
zod("cidr", ['"10.0.0.0/8"'], [], (z) => (z.cidrv4 ? z.cidrv4() : z.string().cidr({ version: "v4" })));
zod("cuid", ['"cjld2cjxh0000qzrmn831i7rn"'], ['"1"'], (z) => z.string().cuid());
zod("cuid2", ['"tz4a98xxat96iws9zmbrgj3a"'], ['"A"'], (z) => z.string().cuid2());
zod("ulid", ['"01ARZ3NDEKTSV4RRFFQ69G5FAV"'], ['"1"'], (z) => z.string().ulid());
zod("nanoid", ['"V1StGXR8_Z5jdHi6B-myT"'], [], (z) => z.string().nanoid());
zod("base64", ['"YQ=="'], [], (z) => z.string().base64());
zod("base64url", ['"YQ"'], [], (z) => z.string().base64url());
zod("jwt", [], [], (z) => z.string().jwt());
zod("emoji", ['"😀"'], [], (z) => z.string().emoji());
zod4("iban", ['"DE89370400440532013000"'], ['"DE00"'], (z) => z.iban());
zod4("e164", ['"+4930123456"'], ['"030"'], (z) => z.e164());
zod4("hex and hash", ['"ab"'], ['"xy"'], (z) => z.hex());
zod4("hostname", ['"a.de"'], ['"a b"'], (z) => z.hostname());
zod4("guid", ['"123e4567-e89b-12d3-a456-426614174000"'], ['"1"'], (z) => z.guid());
zod4("web address", ['"https://a.de"'], [], (z) => z.httpUrl());
zod4("template literal", ['"10px"'], ['"px"'], (z) => z.templateLiteral([z.number(), z.enum(["px", "em"])]));
zod4("stringbool", ['"yes"'], ["true"], (z) => z.stringbool(), { writeAll: { io: "input" } });

// Numbers
zod("number", ["1.5", "-2", "1e3"], ['"1"', "null"], (z) => z.number());
zod("int", ["3", "-3"], ["1.5", '"1"'], (z) => z.number().int());
zod("range of int", ["1", "9"], ["0", "10"], (z) => z.number().int().min(1).max(9));
zod("range", ["0.5"], ["0", "1"], (z) => z.number().gt(0).lt(1));
zod("positive", ["0.1"], ["0", "-1"], (z) => z.number().positive());
zod("negative", ["-0.1"], ["0", "1"], (z) => z.number().negative());
zod("nonnegative int", ["0"], ["-1"], (z) => z.number().int().nonnegative());
zod("multiple", ["10"], ["11"], (z) => z.number().multipleOf(5));
zod("cents", ["0.25"], ["0.255"], (z) => z.number().multipleOf(0.01), SENT);
zod("safe", ["9007199254740991"], ["9007199254740993"], (z) => z.number().int().safe(), SENT);
zod("finite", ["1"], ['"a"'], (z) => z.number().finite());
zod3("bigint", ["1"], ["1.5"], (z) => z.bigint(), SENT);
zod3("bigint with bounds", ["5"], ["11"], (z) => z.bigint().min(1n).max(10n), SENT);
zod4("bigint as any", ["1"], [], (z) => z.bigint(), { ...SENT, writeAll: { unrepresentable: "any" } });
for (const kind of ["int", "int32", "uint32"]) zod4(kind, ["7"], ["1.5", "9007199254740993"], (z) => z[kind]());
for (const kind of ["float32", "float64"]) zod4(kind, ["1.5"], ['"a"'], (z) => z[kind]());
zod("coerced", ["1"], ['"a"'], (z) => z.coerce.number());

// Other values
zod("boolean", ["true"], ["1"], (z) => z.boolean());
zod("null", ["null"], ["1"], (z) => z.null());
zod("any", ["1", '{"a": []}'], [], (z) => z.any());
zod("unknown", ["null", "[1]"], [], (z) => z.unknown());
zod("never, optional", [], ["1"], (z) => z.never().optional());
zod("undefined", [], [], (z) => z.object({ a: z.number(), b: z.never().optional() }));
zod3("date", ['"2026-11-29T12:00:00Z"'], ["1"], (z) => z.date(), SENT);
zod3("date as integer", ["1764417600000"], ['"a"'], (z) => z.date(), { ...SENT, writeAll: { dateStrategy: "integer" } });
zod3("date as date", ['"2026-11-29"'], ["1"], (z) => z.date(), { ...SENT, writeAll: { dateStrategy: "format:date" } });
zod3("date with bounds", ["1764417600000"], ["1"], (z) => z.date().min(new Date(1e12)), { ...SENT, writeAll: { dateStrategy: "integer" } });
zod3("date in several forms", ['"2026-11-29"'], ["true"], (z) => z.date(), { ...SENT, writeAll: { dateStrategy: ["format:date-time", "format:date"] } });
zod4("date as any", ['"2026-11-29"'], [], (z) => z.date(), { ...SENT, writeAll: { unrepresentable: "any" } });
zod4("date as its users write it", ['"2026-11-29T12:00:00Z"'], ["1"], (z) => z.date(), { ...SENT, writeAll: { unrepresentable: "any", override: (ctx) => { if (ctx.zodSchema._zod.def.type === "date") { ctx.jsonSchema.type = "string"; ctx.jsonSchema.format = "date-time"; } } } });
zod("literal", ['"a"'], ['"b"', "1"], (z) => z.literal("a"));
zod("literal number", ["1"], ["2"], (z) => z.literal(1));
zod("literal boolean", ["true"], ["false"], (z) => z.literal(true));
zod4("literal null", ["null"], ["0"], (z) => z.literal(null));
zod4("literals", ['"a"', "1", "null"], ['"b"'], (z) => z.literal(["a", 1, null]));
zod("enum", ['"a"'], ['"c"'], (z) => z.enum(["a", "b"]));
zod("native enum", ['"r"'], ['"RED"'], (z) => z.nativeEnum({ RED: "r", BLUE: "b" }));
zod("native enum of numbers", ["0"], ["2", '"A"'], (z) => z.nativeEnum({ 0: "A", 1: "B", A: 0, B: 1 }));
zod("native enum of both", ["0", '"b"'], ["1"], (z) => z.nativeEnum({ 0: "A", A: 0, B: "b" }));
zod("enum without one", ['"b"'], ['"a"'], (z) => z.enum(["a", "b", "c"]).exclude(["a"]));

// Arrays
zod("array", ["[]", '["a"]'], ["[1]", '"a"'], (z) => z.array(z.string()));
zod("array with bounds", ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"], (z) => z.array(z.number()).min(1).max(2));
zod("array of one length", ["[1, 2]"], ["[1]"], (z) => z.array(z.number()).length(2));
zod("array that is not empty", ["[1]"], ["[]"], (z) => z.array(z.number()).nonempty());
zod("array of arrays", ["[[1], []]"], ['[["a"]]'], (z) => z.array(z.array(z.number())));
zod("array of anything", ['[1, "a"]'], ["1"], (z) => z.array(z.any()));
zod("tuple", ['[1, "a"]'], ['["a", 1]', "[1]", '[1, "a", 2]'], (z) => z.tuple([z.number(), z.string()]), { write: { "zod 4": { target: "draft-2020-12" } }, unjudged: true });
zod("tuple and more", ['[1]', '[1, "a", "b"]'], ["[1, 2]", "[]"], (z) => z.tuple([z.number()]).rest(z.string()));
zod3("set", ["[1, 2]"], ['["a"]'], (z) => z.set(z.number()), SENT);
zod3("map", ['[["a", 1]]'], ['[["a"]]'], (z) => z.map(z.string(), z.number()), SENT);
zod3("map as record", ['{"a": 1}'], ['{"a": "b"}'], (z) => z.map(z.string(), z.number()), { ...SENT, writeAll: { mapStrategy: "record" } });

// Objects
zod("object", ['{"a": 1}'], ['{"a": "b"}', "{}"], (z) => z.object({ a: z.number() }));
zod("empty object", ["{}"], ["1"], (z) => z.object({}));
zod("strict", ['{"a": 1}'], ['{"a": 1, "b": 2}'], (z) => z.object({ a: z.number() }).strict());
zod("passthrough", ['{"a": 1, "b": 2}'], ['{"b": 2}'], (z) => z.object({ a: z.number() }).passthrough());
zod("catchall", ['{"a": 1, "b": "c"}'], ['{"a": 1, "b": 2}'], (z) => z.object({ a: z.number() }).catchall(z.string()));
zod("partial", ["{}", '{"b": 1}'], ['{"b": "a"}'], (z) => z.object({ a: z.number(), b: z.number() }).partial());
zod("extended", ['{"a": 1, "b": 2}'], ['{"a": 1}'], (z) => z.object({ a: z.number() }).extend({ b: z.number() }));
zod("picked", ['{"a": 1}'], ["{}"], (z) => z.object({ a: z.number(), b: z.number() }).pick({ a: true }));
zod("names with signs", ['{"a b": 1, "c/d": 2, "e~f": 3, "$g": 4, "ü": 5}'], ["{}"], (z) => z.object({ "a b": z.number(), "c/d": z.number(), "e~f": z.number(), $g: z.number(), ü: z.number() }));
zod("record", ["{}", '{"x": 1}'], ['{"x": "y"}'], (z) => z.record(z.string(), z.number()));
zod("record of objects", ['{"x": {"a": 1}}'], ['{"x": {}}'], (z) => z.record(z.string(), z.object({ a: z.number() })));
zod("record of anything", ['{"x": [1]}'], ["1"], (z) => z.record(z.string(), z.any()));
zod3("record by enum", ['{"a": 1}'], ['{"c": 1}'], (z) => z.record(z.enum(["a", "b"]), z.number()));
zod4("record by enum, whole", ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "c": 3}'], (z) => z.record(z.enum(["a", "b"]), z.number()));
zod4("partial record", ["{}", '{"a": 1}'], ['{"c": 1}'], (z) => z.partialRecord(z.enum(["a", "b"]), z.number()));
zod("record by pattern", ['{"ab": 1}'], ['{"AB": 1}'], (z) => z.record(z.string().regex(/^[a-z]+$/), z.number()));
zod("record by length", ['{"ab": 1}'], ['{"abc": 1}'], (z) => z.record(z.string().max(2), z.number()));
zod("record by uuid", [], [], (z) => z.record(z.string().uuid(), z.number()));
zod4("loose record", [], [], (z) => z.looseRecord(z.string().regex(/^a/), z.number()));

// Unions and intersections
zod("union", ["1", '"a"'], ["true"], (z) => z.union([z.number(), z.string()]));
zod("union of constraints", ["1", '"ab"'], ["0", '"a"'], (z) => z.union([z.number().min(1), z.string().min(2)]));
zod("union of literals", ['"a"', "1"], ['"b"'], (z) => z.union([z.literal("a"), z.literal(1)]));
zod("union of objects", ['{"a": 1}', '{"b": "x"}'], ['{"a": "x"}'], (z) => z.union([z.object({ a: z.number() }), z.object({ b: z.string() })]));
zod("or", ["null", "[1]"], ["1"], (z) => z.null().or(z.array(z.number())));
const kinds = (z) => [z.object({ kind: z.literal("circle"), r: z.number() }), z.object({ kind: z.literal("box"), w: z.number(), h: z.number() })];
zod("discriminated union", ['{"kind": "circle", "r": 1}', '{"kind": "box", "w": 1, "h": 2}'], ['{"kind": "circle", "w": 1}', '{"kind": "line"}'], (z) => z.discriminatedUnion("kind", kinds(z)));
zod("discriminated union in an array", ['[{"kind": "circle", "r": 1}]'], ['[{"kind": "line"}]'], (z) => z.array(z.discriminatedUnion("kind", kinds(z))));
zod("discriminated by enum", ['{"kind": "b", "n": 1}'], ['{"kind": "c", "n": 1}'], (z) => z.discriminatedUnion("kind", [z.object({ kind: z.enum(["a", "b"]), n: z.number() }), z.object({ kind: z.literal("c"), s: z.string() })]));
zod4("nested discriminated union", ['{"t": "x", "u": "a"}'], ['{"t": "x", "u": "c"}'], (z) => z.discriminatedUnion("t", [z.object({ t: z.literal("y") }), z.discriminatedUnion("u", [z.object({ t: z.literal("x"), u: z.literal("a") }), z.object({ t: z.literal("x"), u: z.literal("b") })])]));
zod4("xor", ['{"a": 1}'], ["{}"], (z) => z.xor([z.object({ a: z.number() }).strict(), z.object({ b: z.number() }).strict()]));
zod("intersection", ['{"a": 1, "b": 2}'], ['{"a": 1}'], (z) => z.intersection(z.object({ a: z.number() }), z.object({ b: z.number() })), { writeAll: { io: "input" } });
zod("and", ['{"a": 1, "b": "x"}'], ['{"b": "x"}'], (z) => z.object({ a: z.number() }).and(z.object({ b: z.string() })), { writeAll: { io: "input" } });
zod("intersection that is closed", ['{"a": 1, "b": 2}'], ['{"a": 1}'], (z) => z.intersection(z.object({ a: z.number() }), z.object({ b: z.number() })));
zod("intersection of unions", ['{"c": 1, "a": 1}'], ['{"c": 1}'], (z) => z.union([z.object({ a: z.number() }), z.object({ b: z.number() })]).and(z.object({ c: z.number() })), { writeAll: { io: "input" } });
zod("intersection with a record", ['{"a": 1, "x": 2}'], ['{"x": 2}'], (z) => z.object({ a: z.number() }).and(z.record(z.string(), z.number())), { writeAll: { io: "input" } });
zod("intersection of numbers", ["3"], ["7", "1"], (z) => z.number().min(2).and(z.number().max(5)));

// Absent, null and default values
const objects = (inner) => (z) => z.object({ a: inner(z) });
zod("optional", ["{}", '{"a": 1}'], ['{"a": null}'], objects((z) => z.number().optional()));
zod("nullable", ["null", "1"], ['"a"'], (z) => z.number().nullable());
zod("nullable string", ["null", '"a"'], ["1"], (z) => z.string().nullable());
zod("nullable enum", ["null", '"a"'], ['"c"'], (z) => z.enum(["a", "b"]).nullable());
zod("nullable literal", ["null", '"a"'], ['"c"'], (z) => z.literal("a").nullable());
zod("nullable object", ["null", '{"a": 1}'], ["1"], (z) => z.object({ a: z.number() }).nullable());
zod("nullish", ["{}", '{"a": null}'], ['{"a": "b"}'], objects((z) => z.number().nullish()));
zod("default", ['{"a": 1}'], ['{"a": "b"}'], objects((z) => z.number().default(3)));
zod("default of input", ["{}", '{"a": 1}'], ['{"a": "b"}'], objects((z) => z.number().default(3)), { writeAll: { io: "input" } });
zod("default object", ['{"a": {"b": 1}}'], ['{"a": 1}'], objects((z) => z.object({ b: z.number() }).default({ b: 1 })));
zod("catch", ['{"a": 1}'], ['{"a": "b"}'], objects((z) => z.number().catch(3)), SENT);
zod4("prefault", ["{}", '{"a": 1}'], ['{"a": "b"}'], objects((z) => z.number().prefault(3)), { writeAll: { io: "input" } });
zod("readonly", ["[1]"], ['["a"]'], (z) => z.array(z.number()).readonly());
zod("brand", ['"a"'], ["1"], (z) => z.string().brand("Id"));
zod("described", ['"a"'], ["1"], (z) => z.string().describe('what it "is"'));
zod4("meta", ["1"], ['"a"'], (z) => z.number().meta({ id: "Count", title: "Count", examples: [1, 2], deprecated: true }));
zod4("meta that is used twice", ['{"a": {"x": 1}, "b": {"x": 2}}'], ['{"a": {"x": 1}, "b": {}}'], (z) => { const p = z.object({ x: z.number() }).meta({ id: "Point 2/D" }); return z.object({ a: p, b: p }); });

// What JSON schemas can't say
zod("refined", ["2"], ['"a"'], (z) => z.number().refine((n) => n % 2 === 0));
zod("refined object", ['{"a": 1, "b": 1}'], ['{"a": 1}'], (z) => z.object({ a: z.number(), b: z.number() }).superRefine(() => {}));
zod("transformed", ['"a"'], ["1"], (z) => z.string().transform((s) => s.length), { writeAll: { io: "input" } });
zod("pipe", ['"1"'], ["1"], (z) => z.string().transform(Number).pipe(z.number()), { writeAll: { io: "input", pipeStrategy: "input" } });
zod3("pipe of both", ['"abc"'], ['"a"'], (z) => z.string().pipe(z.string().min(3)));
zod("preprocess", ["1"], ['"a"'], (z) => z.preprocess((v) => v, z.number()));
zod3("promise", ["1"], [], (z) => z.promise(z.number()), SENT);
zod3("function", [], [], (z) => z.function(), SENT);

// Recursion
const tree = (z) => { const t = z.lazy(() => z.object({ n: z.number(), kids: z.array(t) })); return t; };
zod("tree", ['{"n": 1, "kids": [{"n": 2, "kids": []}]}'], ['{"n": 1, "kids": [{"n": 2}]}'], tree);
const list = (z) => { const l = z.object({ n: z.number(), next: z.lazy(() => l).nullable() }); return l; };
zod("list", ['{"n": 1, "next": {"n": 2, "next": null}}'], ['{"n": 1, "next": {"n": 2}}'], list);
const json = (z) => { const j = z.lazy(() => z.union([z.string(), z.number(), z.boolean(), z.null(), z.array(j), z.record(z.string(), j)])); return j; };
zod("json", ['{"a": [1, {"b": null}]}', "1"], [], json);
zod4("z.json", ['{"a": [1, {"b": null}]}'], [], (z) => z.json());
const both = (z) => { const a = z.lazy(() => z.object({ b: b.optional() })), b = z.lazy(() => z.object({ a: a.optional() })); return a; };
zod("mutual recursion", ['{"b": {"a": {}}}'], ['{"b": {"a": 1}}'], both);
zod4("recursion by getters", ['{"n": 1, "kids": [{"n": 2, "kids": []}]}'], ['{"n": 1, "kids": [{"n": 2}]}'], (z) => { const t = z.object({ n: z.number(), get kids() { return z.array(t); } }); return t; });

// Whole documents, at the root, in all forms that the libraries write
const document = (z) => {
  const address = z.object({ street: z.string().min(1), zip: z.string().regex(/^\d{5}$/), note: z.string().nullable().optional() });
  return z.object({
    id: z.string().uuid(), age: z.number().int().min(0).max(150).nullable(), role: z.enum(["admin", "user"]).default("user"),
    tags: z.array(z.string()).max(3), home: address, work: address.optional(), scores: z.record(z.string(), z.number()),
    shape: z.discriminatedUnion("kind", kinds(z)), place: z.tuple([z.number(), z.number()]), tree: tree(z),
  });
};
const whole = { id: "123e4567-e89b-12d3-a456-426614174000", age: null, role: "user", tags: ["a"], home: { street: "b", zip: "12345" }, scores: { a: 1 }, shape: { kind: "circle", r: 1 }, place: [1, 2], tree: { n: 1, kids: [{ n: 2, kids: [] }] } };
const good = [JSON.stringify(whole)], bad = [["age", 151], ["home", { street: "", zip: "12345" }], ["shape", { kind: "box", r: 1 }], ["place", [1]], ["tree", { n: 1, kids: [{}] }], ["tags", ["a", "b", "c", "d"]]].map(([key, value]) => JSON.stringify({ ...whole, [key]: value }));
// OpenAPI's nullable is no keyword of JSON Schema; OpenAI's schemas require all properties; some forms end recursion.
const aged = [JSON.stringify({ ...whole, age: 5 })], { place } = whole, all = { ...whole, home: { ...whole.home, note: null } };
const called = { id: all.id, age: null, role: null, tags: [], home: all.home, work: null, scores: {}, shape: all.shape, place, tree: all.tree };
const shallow = bad.filter((text) => !text.includes("{}"));
const DIFFERENT = { "OpenAPI 3": [aged, bad], OpenAI: [[JSON.stringify(called)], [...shallow, ...good]], inline: [good, shallow], seen: [good, shallow] };
for (const [name, options] of Object.entries({ default: {}, "2019-09": { target: "jsonSchema2019-09" }, "OpenAPI 3": { target: "openApi3" }, OpenAI: { target: "openAi" }, "inline": { $refStrategy: "none" }, "seen": { $refStrategy: "seen" }, "relative refs": { $refStrategy: "relative" }, "named": { name: "User", definitionPath: "$defs" }, "named definition": "User", "title": { nameStrategy: "title", name: "User" }, "strict": { strictUnions: true, errorMessages: true } }))
  zod3(`document, ${name}`, ...(DIFFERENT[name] ?? [good, bad]), document, { root: true, unjudged: true, writeAll: options });
for (const [name, options] of Object.entries({ default: {}, "draft 7": { target: "draft-7" }, "draft 4": { target: "draft-4" }, "OpenAPI 3": { target: "openapi-3.0" }, input: { io: "input" }, "reused as refs": { reused: "ref" } }))
  zod4(`document, ${name}`, ...(DIFFERENT[name] ?? [good, bad]), document, { root: true, unjudged: true, writeAll: options });
zod("union at the root", ['{"kind": "circle", "r": 1}'], ['{"kind": "line"}'], (z) => z.discriminatedUnion("kind", kinds(z)), { root: true });
zod("array at the root", ['["a"]'], ["[1]"], (z) => z.array(z.string()), { root: true });
zod("enum at the root", ['"a"'], ['"c"'], (z) => z.enum(["a", "b"]), { root: true });
zod("recursion at the root", ['{"n": 1, "kids": []}'], ['{"kids": []}'], tree, { root: true });

// TypeBox
box("string", ['"a"'], ["1"], (T) => T.String());
box("string with bounds", ['"ab"'], ['"abc"'], (T) => T.String({ minLength: 1, maxLength: 2 }));
box("pattern", ['"AB"'], ['"ab"'], (T) => T.String({ pattern: "^[A-Z]+$" }));
for (const [format, text, wrong] of [["email", "a@b.de", "a"], ["date-time", "2026-11-29T12:00:00Z", "now"], ["date", "2026-11-29", "now"], ["uuid", "123e4567-e89b-12d3-a456-426614174000", "1"], ["uri", "https://a.de/b", "a b"], ["ipv4", "10.0.0.1", "a"], ["ipv6", "::1", "a"]])
  box(format, [`"${text}"`], [`"${wrong}"`], (T) => T.String({ format }), SENT);
box("number", ["1.5"], ['"a"'], (T) => T.Number());
box("integer with bounds", ["1"], ["10", "1.5"], (T) => T.Integer({ minimum: 1, exclusiveMaximum: 10 }));
box("multiple", ["0.75"], ["0.3"], (T) => T.Number({ multipleOf: 0.25 }));
box("boolean and null", ["true", "null"], ["1"], (T) => T.Union([T.Boolean(), T.Null()]));
box("any", ["1", "[]"], [], (T) => T.Any());
box("unknown", ["1"], [], (T) => T.Unknown());
box("never in an optional field", ["{}"], ['{"a": 1}'], (T) => T.Object({ a: T.Optional(T.Never()) }));
box("literal", ['"a"'], ['"b"'], (T) => T.Literal("a"));
box("union of literals", ['"a"', "1"], ['"b"'], (T) => T.Union([T.Literal("a"), T.Literal(1)]));
box("enum", ['"r"'], ['"RED"'], (T) => T.Enum({ RED: "r", BLUE: "b" }));
box("enum of numbers", ["0"], ["2"], (T) => T.Enum({ A: 0, B: 1 }));
box("object", ['{"a": 1}'], ["{}"], (T) => T.Object({ a: T.Number(), b: T.Optional(T.String()) }));
box("closed object", ['{"a": 1}'], ['{"a": 1, "c": 1}'], (T) => T.Object({ a: T.Number() }, { additionalProperties: false }));
box("open object", ['{"a": 1, "c": "x"}'], ['{"a": 1, "c": 1}'], (T) => T.Object({ a: T.Number() }, { additionalProperties: T.String() }));
box("partial", ["{}"], ['{"a": "x"}'], (T) => T.Partial(T.Object({ a: T.Number() })));
box("required", ['{"a": 1}'], ["{}"], (T) => T.Required(T.Partial(T.Object({ a: T.Number() }))));
box("pick and omit", ['{"a": 1}'], ["{}"], (T) => T.Omit(T.Pick(T.Object({ a: T.Number(), b: T.Number(), c: T.Number() }), ["a", "b"]), ["b"]));
box("names of an object", ['"a"'], ['"c"'], (T) => T.KeyOf(T.Object({ a: T.Number(), b: T.Number() })));
box("type of a field", ["1"], ['"a"'], (T) => T.Index(T.Object({ a: T.Number() }), T.Literal("a")));
box("array", ["[1]"], ['["a"]', "[]"], (T) => T.Array(T.Number(), { minItems: 1, maxItems: 2 }));
box("array of different items", ["[1, 2]"], ["[1, 1]"], (T) => T.Array(T.Number(), { uniqueItems: true }));
box("array that contains", ["[1, 2]"], ["[2]"], (T) => T.Array(T.Number(), { contains: T.Literal(1), minContains: 1 }));
box("tuple", ['[1, "a"]'], ["[1]", '[1, "a", 2]'], (T) => T.Tuple([T.Number(), T.String()]));
box("empty tuple", ["[]"], ["[1]"], (T) => T.Tuple([]));
box("record", ['{"x": 1}', "{}"], ['{"x": "a"}'], (T) => T.Record(T.String(), T.Number()));
box("record by number", ['{"1": "a"}'], ['{"1": 2}'], (T) => T.Record(T.Number(), T.String()));
box("record by literals", ['{"a": 1, "b": 2}'], ['{"a": 1}'], (T) => T.Record(T.Union([T.Literal("a"), T.Literal("b")]), T.Number()));
box("record by pattern", ['{"ab": 1}'], ['{"ab": "x"}'], (T) => T.Record(T.String({ pattern: "^[a-z]+$" }), T.Number()));
add(["TypeBox 0.34"], "template literal", ['"on-1"'], ['"no-1"'], (T) => T.TemplateLiteral("${on|off}-${1|2}"));
box("union", ["1", '"a"'], ["true"], (T) => T.Union([T.Number(), T.String()]));
box("union of objects", ['{"k": "a", "n": 1}'], ['{"k": "c"}'], (T) => T.Union([T.Object({ k: T.Literal("a"), n: T.Number() }), T.Object({ k: T.Literal("b") })]));
box("intersection", ['{"a": 1, "b": 2}'], ['{"a": 1}'], (T) => T.Intersect([T.Object({ a: T.Number() }), T.Object({ b: T.Number() })]));
box("closed intersection", ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "c": 3}'], (T) => T.Intersect([T.Object({ a: T.Number() }), T.Object({ b: T.Number() })], { unevaluatedProperties: false }));
add(["TypeBox 0.34"], "composite", ['{"a": 1, "b": 2}'], ['{"a": 1}'], (T) => T.Composite([T.Object({ a: T.Number() }), T.Object({ b: T.Number() })]));
add(["TypeBox 0.34"], "not", ["1"], ['"a"'], (T) => T.Not(T.String()));
add(["TypeBox 0.34"], "regular expression", ['"aa"'], ['"b"'], (T) => T.RegExp(/^a+$/));
add(["TypeBox 0.34"], "tree", ['{"n": 1, "kids": [{"n": 2, "kids": []}]}'], ['{"n": 1, "kids": [{}]}'], (T) => T.Recursive((This) => T.Object({ n: T.Number(), kids: T.Array(This) })));
add(["TypeBox 0.34"], "tree with an id", ['{"n": 1, "kids": []}'], ['{"kids": []}'], (T) => T.Recursive((This) => T.Object({ n: T.Number(), kids: T.Array(This) }), { $id: "Node" }));
add(["TypeBox 0.34"], "module", ['{"n": 1, "kids": [{"n": 2, "kids": []}]}'], ['{"n": 1, "kids": [{}]}'], (T) => T.Module({ Node: T.Object({ n: T.Number(), kids: T.Array(T.Ref("Node")) }) }).Import("Node"), { root: true });
add(["TypeBox 1"], "module", ['{"n": 1, "kids": [{"n": 2, "kids": []}]}'], ['{"n": 1, "kids": [{}]}'], (T) => T.Module({ Node: T.Object({ n: T.Number(), kids: T.Array(T.Ref("Node")) }) }).Node, { root: true });
add(["TypeBox 1"], "cyclic", ['{"n": 1, "kids": [{"n": 2, "kids": []}]}'], ['{"n": 1, "kids": [{}]}'], (T) => T.Cyclic({ Node: T.Object({ n: T.Number(), kids: T.Array(T.Ref("Node")) }) }, "Node"));
box("readonly and default", ["1"], ['"a"'], (T) => T.Readonly(T.Number({ default: 1, description: "what", title: "N", examples: [1] })));
box("date", ['"2026-11-29"'], ["1"], (T) => (T.Date ? T.Unsafe({ type: "string", format: "date" }) : T.String({ format: "date" })), SENT);
box("nullable, unsafe", ['"a"'], ["1"], (T) => T.Unsafe({ type: "string", nullable: true }), SENT);
box("enum, unsafe", ['"a"'], ['"c"'], (T) => T.Unsafe({ type: "string", enum: ["a", "b"] }), SENT);
box("object at the root", ['{"a": 1}'], ["{}"], (T) => T.Object({ a: T.Number() }, { $id: "Args", additionalProperties: false }), { root: true });

// The same schema of several libraries is one case.
const sorted = (one) => (Array.isArray(one) ? one.map(sorted) : one && typeof one === "object" ? Object.fromEntries(Object.keys(one).sort().map((key) => [key, sorted(one[key])])) : one);
const cases = new Map();
for (const { library, ...one } of ALL) {
  const key = JSON.stringify([one.name, one.good, one.bad, sorted(one.schema)]);
  if (cases.has(key)) cases.get(key).of.push(library);
  else cases.set(key, { of: [library], ...one });
}
const versions = Object.fromEntries(["zod", "zod3", "zod-to-json-schema", "@sinclair/typebox", "typebox"].map((name) => [name, JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version]));
console.log(`{"versions": ${JSON.stringify(versions)}, "cases": [\n${[...cases.values()].map((one) => JSON.stringify(one)).join(",\n")}\n]}`);
