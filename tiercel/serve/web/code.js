/**
 * Code blocks: a header with the language and a copy button, and colours for simple tokens.
 *
 * One small lexer serves all languages: comments, strings, numbers and a family's keywords. Other
 * text stays uncoloured, which is never wrong.
 */

import { copyButton, element } from "./dom.js";

const MAX_COLOURED_CHARACTERS = 40_000;

const DOUBLE = String.raw`"(?:[^"\\\n]|\\.)*"?`;
const SINGLE = String.raw`'(?:[^'\\\n]|\\.)*'?`;
const C_STRINGS = String.raw`${DOUBLE}|'(?:[^'\\\n]|\\.){1,10}'`; // no Rust lifetimes
const JS_STRINGS = `${DOUBLE}|${SINGLE}|\`(?:[^\`\\\\]|\\\\[^])*\`?`;
const PLAIN_STRINGS = `${DOUBLE}|${SINGLE}`;
const PYTHON_STRINGS = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|${PLAIN_STRINGS}`;
const SLASH_COMMENTS = String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$)`;
const HASH_COMMENTS = String.raw`(?<![^\s;(])#.*`;
const SQL_COMMENTS = String.raw`--.*|\/\*[^]*?(?:\*\/|$)`;

const C_WORDS =
  "auto bool break case catch char class const constexpr continue default delete do double else " +
  "enum extends extern false final float for fn fun func goto if impl implements import in " +
  "inline int interface let long loop match mod mut namespace new nil null nullptr operator " +
  "override package private protected pub public return self short signed sizeof static string " +
  "struct super switch template this throw throws trait true try type typedef typename union " +
  "unsafe unsigned use using val var virtual void volatile when where while";
const JS_WORDS =
  "async await break case catch class const continue default delete do else enum export extends " +
  "false finally for from function if implements import in instanceof interface let new null of " +
  "readonly return static super switch this throw true try type typeof undefined var void while " +
  "yield";
const PYTHON_WORDS =
  "False None True and as assert async await break case class continue def del elif else except " +
  "finally for from global if import in is lambda match nonlocal not or pass raise return self " +
  "try while with yield";
const SHELL_WORDS =
  "case do done elif else esac exit export fi for function if in local return set then until " +
  "while begin class def end module require true false nil";
const SQL_WORDS =
  "all alter and as asc between by case create cross delete desc distinct drop else end exists " +
  "from full group having in index inner insert into is join key left like limit not null on or " +
  "order outer primary references right select set table then union unique update values view " +
  "when where with";
const DATA_WORDS = "true false null yes no on off";

const FAMILIES = [
  {
    names: "c cc cpp c++ cu cuda h hpp java cs csharp go rust rs swift kotlin kt scala dart zig",
    parts: [SLASH_COMMENTS, C_STRINGS, C_WORDS, ""],
  },
  {
    names: "js javascript jsx ts typescript tsx mjs php",
    parts: [SLASH_COMMENTS, JS_STRINGS, JS_WORDS, ""],
  },
  { names: "py python python3", parts: [HASH_COMMENTS, PYTHON_STRINGS, PYTHON_WORDS, ""] },
  {
    names: "sh bash shell zsh console ruby rb perl r make makefile dockerfile",
    parts: [HASH_COMMENTS, PLAIN_STRINGS, SHELL_WORDS, ""],
  },
  { names: "sql", parts: [SQL_COMMENTS, PLAIN_STRINGS, SQL_WORDS, "i"] },
  {
    names: "json jsonc yaml yml toml ini",
    parts: [`${HASH_COMMENTS}|(?<![^\\s])${SLASH_COMMENTS}`, PLAIN_STRINGS, DATA_WORDS, ""],
  },
];
const LEXERS = new Map(
  FAMILIES.flatMap(({ names, parts }) => {
    const lexer = makeLexer(...parts);
    return names.split(" ").map((name) => [name, lexer]);
  }),
);

function makeLexer(comments, strings, words, flags) {
  const numbers = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
  const keywords = `\\b(?:${words.replaceAll(" ", "|")})\\b`;
  const pattern = `(?<comment>${comments})|(?<string>${strings})|(?<number>${numbers})`;
  return new RegExp(`${pattern}|(?<keyword>${keywords})`, `g${flags}`);
}

/** The node of a code block. */
export function codeBlock(code, language) {
  const body = element("code");
  fill(body, code, LEXERS.get(language.toLowerCase()));
  return element(
    "div",
    { class: "code" },
    element(
      "div",
      { class: "code-head" },
      element("span", {}, language || "text"),
      copyButton("Copy code", () => code),
    ),
    element("pre", { tabindex: 0 }, body),
  );
}

function fill(body, code, lexer) {
  if (!lexer || code.length > MAX_COLOURED_CHARACTERS) {
    body.textContent = code;
    return;
  }
  let end = 0;
  for (const match of code.matchAll(lexer)) {
    const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    if (!match[0]) continue;
    body.append(code.slice(end, match.index), element("span", { class: `t-${kind}` }, match[0]));
    end = match.index + match[0].length;
  }
  body.append(code.slice(end));
}
