/**
 * Colours for code: comments, strings, numbers and keywords of common languages. Pure, and linear in the code's length.
 * @module
 */

const WORDS = new Set(
  (
    "abstract and as assert async await auto bool boolean break case catch char class const constexpr continue def " +
    "default defer del delete do double elif else enum except export extends extern false False final finally float " +
    "fn for from func function go if impl implements import in instanceof int interface is lambda let long loop match " +
    "mod mut namespace new nil None nonlocal not null of or override package pass private protected pub public raise " +
    "return self short static struct super switch template this throw trait true True try type typedef typeof union " +
    "unsigned use using var virtual void where while with yield select insert update create table join group order by"
  ).split(" "),
);
const HASH_COMMENTS = new Set([
  "python",
  "py",
  "sh",
  "bash",
  "shell",
  "zsh",
  "ruby",
  "rb",
  "yaml",
  "yml",
  "toml",
  "r",
  "perl",
  "make",
  "makefile",
  "dockerfile",
  "",
]);
const DASH_COMMENTS = new Set(["sql", "lua", "haskell", "hs", "ada"]);
const SLASH_COMMENTS = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|(?![^]))/;
const STRINGS =
  /"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^]))|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?/;
const NUMBERS = /\b(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b/;
const NAMES = /[A-Za-z_$][\w$]*/;
const PLAIN_LANGUAGES = new Set(["text", "txt", "plain", "plaintext", "output", "console", "markdown", "md", "diff"]);

/**
 * @param {string} code
 * @param {string} language as after the fence; may be empty
 * @returns {{kind: "" | "comment" | "string" | "number" | "keyword", text: string}[]}
 */
export function highlight(code, language) {
  if (PLAIN_LANGUAGES.has(language)) return [{ kind: "", text: code }];
  const pattern = patternOf(language);
  const found = [];
  let end = 0;
  for (const match of code.matchAll(pattern)) {
    const kind = kindOf(match);
    if (kind === "") continue;
    if (match.index > end) found.push({ kind: /** @type {const} */ (""), text: code.slice(end, match.index) });
    found.push({ kind, text: match[0] });
    end = match.index + match[0].length;
  }
  if (end < code.length) found.push({ kind: /** @type {const} */ (""), text: code.slice(end) });
  return found;
}

/** @param {string} language */
function patternOf(language) {
  const comments = [];
  if (HASH_COMMENTS.has(language)) comments.push("(?<=^|\\s)#[^\\n]*");
  if (DASH_COMMENTS.has(language)) comments.push("--[^\\n]*");
  if (!HASH_COMMENTS.has(language) || language === "") comments.push(SLASH_COMMENTS.source);
  return new RegExp(`(${comments.join("|")})|(${STRINGS.source})|(${NUMBERS.source})|(${NAMES.source})`, "gm");
}

/**
 * @param {RegExpMatchArray} match
 * @returns {"" | "comment" | "string" | "number" | "keyword"}
 */
function kindOf(match) {
  if (match[1] !== undefined) return "comment";
  if (match[2] !== undefined) return "string";
  if (match[3] !== undefined) return "number";
  return WORDS.has(match[4]) ? "keyword" : "";
}
