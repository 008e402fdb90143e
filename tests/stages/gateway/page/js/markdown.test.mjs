// Markdown: what is recognized, what is not, and that no text takes long.

import assert from "node:assert/strict";
import { test } from "node:test";

import { highlight } from "../page/chat/highlight.js";
import { inline, safeUrl } from "../page/chat/inline.js";
import { parse } from "../page/chat/markdown.js";

const blocks = (text) => parse(text).map(({ block }) => block);
const text = (words) => ({ type: "text", text: words });

/** Fails if a call takes more than 1.5 s of CPU time: beside other processes, the clock shows their time, too. */
function quick(what, call) {
  const begin = process.cpuUsage();
  const result = call();
  const { user, system } = process.cpuUsage(begin);
  assert.ok(user + system < 1_500_000, `${what} took ${(user + system) / 1000} ms`);
  return result;
}

/** All text of a tree, in order. */
function words(node) {
  if (Array.isArray(node)) return node.map(words).join("");
  if (node.type === "break") return "\n";
  const inner = node.children ?? node.items ?? (node.rows ? [node.head, ...node.rows] : undefined);
  return inner ? words(inner) : (node.text ?? "");
}

test("paragraphs, headings and rules", () => {
  assert.deepEqual(blocks("# One\nTwo\n\n***\n## Three ##"), [
    { type: "heading", level: 1, children: [text("One")] },
    { type: "paragraph", children: [text("Two")] },
    { type: "rule" },
    { type: "heading", level: 2, children: [text("Three")] },
  ]);
  assert.equal(blocks("#no heading")[0].type, "paragraph");
  assert.deepEqual(blocks("#"), [{ type: "heading", level: 1, children: [] }]);
  assert.deepEqual(blocks("# ##"), [{ type: "heading", level: 1, children: [] }]);
});

test("emphasis, code and deletions", () => {
  assert.deepEqual(inline("a **b *c*** `d*e*` ~~f~~"), [
    text("a "),
    { type: "strong", children: [text("b "), { type: "em", children: [text("c")] }] },
    text(" "),
    { type: "code", text: "d*e*" },
    text(" "),
    { type: "del", children: [text("f")] },
  ]);
});

test("marks without an end are text", () => {
  for (const line of ["2 * 3 * 4", "snake_case_name", "**open", "a `b", "[x](", "\\*not\\*", "<b>bold</b>", "~~"]) {
    assert.deepEqual(
      inline(line).map(({ type }) => type),
      ["text"],
      line,
    );
  }
  assert.equal(words(inline("\\*not\\*")), "*not*");
  assert.equal(words(inline("<img src=x onerror=alert(1)>")), "<img src=x onerror=alert(1)>");
});

test("a block of code ends with its mark, or with the text", () => {
  assert.deepEqual(blocks("```js\nlet a = 1;\n\n**b**\n```\nafter"), [
    { type: "fence", language: "js", text: "let a = 1;\n\n**b**" },
    { type: "paragraph", children: [text("after")] },
  ]);
  assert.deepEqual(blocks("~~~\nopen"), [{ type: "fence", language: "", text: "open" }]);
  assert.deepEqual(blocks("````\n```\n````")[0], { type: "fence", language: "", text: "```" });
  assert.deepEqual(blocks("```  C++ and more\nx")[0], { type: "fence", language: "c++", text: "x" });
});

test("lists, also nested and with code", () => {
  const [list] = blocks("3. one\n4. two\n   - a\n   - b\n\n   ```\n   x\n   ```");
  assert.equal(list.ordered, true);
  assert.equal(list.start, 3);
  assert.deepEqual(
    list.items.map((item) => item.map(({ type }) => type)),
    [["paragraph"], ["paragraph", "list", "fence"]],
  );
  assert.equal(list.items[1][2].text, "x");
  assert.deepEqual(
    blocks("- a\n- b\n\ntext").map(({ type }) => type),
    ["list", "paragraph"],
  );
  assert.equal(blocks("* a\n\n* b")[0].items.length, 2);
});

test("quotes and tables", () => {
  const [quote] = blocks("> one\n> - two");
  assert.deepEqual(
    quote.children.map(({ type }) => type),
    ["paragraph", "list"],
  );
  const [table] = blocks("| a | b |\n|:--|--:|\n| 1 | **2** |\n| 3 |");
  assert.deepEqual(table.align, ["start", "end"]);
  assert.deepEqual(
    table.rows.map((row) => row.map(words)),
    [
      ["1", "2"],
      ["3"],
    ],
  );
  assert.equal(blocks("a | b\nc | d")[0].type, "paragraph");
});

test("only addresses of the web are links", () => {
  assert.deepEqual(inline('[x](https://example.com/a_b "t")'), [
    { type: "link", href: "https://example.com/a_b", children: [text("x")] },
  ]);
  const [, link, dot] = inline("see https://example.com/a_(b). ");
  assert.deepEqual([link.href, dot.text], ["https://example.com/a_(b", "). "]);
  assert.equal(inline("<https://example.com>")[0].href, "https://example.com/");
  for (const address of [
    "javascript:alert(1)",
    " javascript:alert(1)",
    "data:text/html,x",
    "//example.com",
    "/x",
    "vbscript:x",
    "http://[",
    "JaVaScRiPt:x",
  ]) {
    assert.equal(safeUrl(address), null, address);
    const nodes = inline(`[x](${address})`);
    assert.ok(!nodes.some(({ type }) => type === "link"), address);
  }
});

test("an address that is too long is text", () => {
  const address = `http://a/${"b".repeat(2000)}`;
  for (const text of [address, `<${address}>`, `[c](${address})`]) {
    assert.deepEqual(
      parse(text).map(({ block }) => block),
      [{ type: "paragraph", children: [{ type: "text", text }] }],
    );
  }
});

test("a text that streams keeps the blocks before its last one", () => {
  const whole = "# A\n\nfirst\n\n```py\nx = 1\n```\n\n- a\n- b";
  for (let end = 1; end < whole.length; end += 1) {
    const parts = parse(whole.slice(0, end));
    const later = parse(whole);
    for (const [place, { source }] of parts.slice(0, -1).entries()) assert.equal(source, later[place].source, `${end}`);
  }
});

test("no text takes long", () => {
  const size = 160_000;
  const texts = [
    "*",
    "**a ",
    "_a",
    "`",
    "``a",
    "[",
    "[a](",
    "](",
    "> ",
    "- ",
    "1. ",
    "|",
    "|-",
    "#",
    "# #",
    "~~a",
    "\\",
    "<",
    "h",
    "https://a",
    "](http://",
    "[a](http://",
    "<http://[",
    "http://))",
    " ",
    "\n",
    "a\n",
    "*a_b`c[d",
    "| a\n|--\n",
  ];
  for (const part of texts) {
    const long = part.repeat(Math.ceil(size / part.length));
    quick(JSON.stringify(part), () => parse(long));
  }
});

test("no line takes long, whatever its length", () => {
  const size = 160_000;
  const space = " ".repeat(size);
  for (const long of [
    `a|b\n|---${space}x`,
    `a|b\n|---${"\t".repeat(size / 4)}x`,
    `\`\`\`${space}\``,
    `\`\`\`${"a".repeat(size)}\``,
    `#${space}\rx`,
    `# a ${"#".repeat(size)}x`,
    `*${space}*x`,
    `${space}x`,
  ]) {
    quick(JSON.stringify(long.slice(0, 12)), () => parse(long));
  }
});

test("a table has no more cells than were written, and no more columns than a browser can lay out", () => {
  const num = 20_000;
  const head = (columns) => `${"|a".repeat(columns)}\n${"|-".repeat(columns)}\n`;
  for (const [rows, most] of [
    ["|\n".repeat(num), num],
    ["|b".repeat(num), 256],
  ]) {
    const [table] = blocks(head(256) + rows);
    const count = table.rows.reduce((sum, row) => sum + row.length, 0);
    assert.ok(count <= most, `${count} cells`);
    const [first] = quick("a wide head", () => blocks(head(num) + rows));
    assert.equal(first.type, "paragraph");
  }
});

test("highlighting changes no text", () => {
  const code = 'def f(x):  # "why"\n    return "a\\"b" + str(0x1F) + \'\'\'c\n';
  const parts = highlight(code, "python");
  assert.equal(parts.map((part) => part.text).join(""), code);
  assert.deepEqual(
    parts.filter(({ kind }) => kind).map(({ kind, text: part }) => [kind, part]),
    [
      ["keyword", "def"],
      ["comment", '# "why"'],
      ["keyword", "return"],
      ["string", '"a\\"b"'],
      ["number", "0x1F"],
      ["string", "'''c\n"],
    ],
  );
  assert.equal(highlight("// a\nint b; /* c", "c").filter(({ kind }) => kind === "comment").length, 2);
  assert.equal(highlight("--x -- y", "sql").find(({ kind }) => kind === "comment").text, "--x -- y");
  assert.deepEqual(highlight("if x", "text"), [{ kind: "", text: "if x" }]);
});
