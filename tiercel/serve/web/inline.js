/**
 * Markdown within a line: emphasis, code, links, breaks, as DOM nodes.
 *
 * Emphasis follows CommonMark's delimiter stack, which takes time linear in the text: every search
 * that can fail remembers that it failed, so hostile text stays cheap.
 * Images are shown as links: loading them would tell another server that this answer was read.
 */

import { element } from "./dom.js";
import { formula } from "./math.js";

const MAX_NESTING = 24; // deeper emphasis stays as typed: layout of very deep trees overflows
const MAX_FORMULA_CHARACTERS = 4000; // longer text is no formula
const MAX_TARGET_CHARACTERS = 2048;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const SPACE = /\s/u;
const BARE_URL = /https?:\/\/[^\s<>"`]+/y;
const ANGLE_URL = /<(https?:\/\/[^\s<>]*)>/y;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(amp|lt|gt|quot|apos|nbsp));/y;
const LINE_BREAK = /<br ?\/?>/iy;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORDY = /[\p{L}\p{N}]/u;
const ORDINAL = /^(?:th|st|nd|rd|s)(?![\p{L}\p{N}])/u; // as in "the $n$th element"
const NO_FORMULA_START = /^\s*[),.;:!?]/; // between the dollars of "cheap ($), dear ($$)"

/** The address if links to it are allowed, else null: other schemes can run code or programs. */
export function safeAddress(text) {
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch {
    return null;
  }
}

/** Turns a line or paragraph into nodes. */
export function inlineNodes(text) {
  return new InlineParser(text).parse();
}

class InlineParser {
  #text;
  #position = 0;
  #root = document.createDocumentFragment();
  #plain = "";
  #delimiters = []; // runs of * _ ~ that may open or close
  #brackets = []; // positions of [ that may become links
  #depths = new Map(); // element -> how deep its own nesting goes
  #lastTicks = null; // run length -> last position at which a run of it begins
  #unclosed = new Set(); // formula closers that do not occur in the remaining text
  #dollars = null; // number of dollars -> positions that may end a formula, the next one last

  constructor(text) {
    this.#text = text;
  }

  parse() {
    while (this.#position < this.#text.length) this.#step();
    this.#flush();
    this.#pairEmphasis(0);
    this.#root.normalize();
    return this.#root;
  }

  #step() {
    const char = this.#text[this.#position];
    if (char === "\\") this.#escape();
    else if (char === "$") this.#dollar();
    else if (char === "`") this.#code();
    else if (char === "*" || char === "_" || char === "~") this.#delimiter(char);
    else if (char === "[") this.#openBracket(1);
    else if (char === "!" && this.#text[this.#position + 1] === "[") this.#openBracket(2);
    else if (char === "]") this.#closeBracket();
    else if (char === "\n") this.#lineEnd();
    else if (char === "<" || char === "&" || char === "h") this.#special();
    else this.#take(1);
  }

  #take(count) {
    this.#plain += this.#text.slice(this.#position, this.#position + count);
    this.#position += count;
  }

  #flush() {
    if (this.#plain) this.#root.append(this.#plain);
    this.#plain = "";
  }

  #append(node, count) {
    this.#flush();
    this.#root.append(node);
    this.#position += count;
  }

  #escape() {
    const next = this.#text[this.#position + 1] ?? "";
    if (next === "(" && this.#math("\\)", false)) return;
    if (next === "[" && this.#math("\\]", true)) return;
    if (next === "\n") {
      this.#append(element("br"), 2);
    } else if (ESCAPABLE.test(next)) {
      this.#plain += next;
      this.#position += 2;
    } else {
      this.#take(1);
    }
  }

  #math(closer, isDisplay) {
    const start = this.#position + 2;
    const end = this.#unclosed.has(closer) ? -1 : this.#text.indexOf(closer, start);
    if (end < 0) this.#unclosed.add(closer);
    return this.#formula(2, end, isDisplay);
  }

  #dollar() {
    let width = 1;
    while (this.#text[this.#position + width] === "$") width += 1;
    if (width === 1 && this.#singleDollar()) return;
    if (width === 2 && this.#formula(2, this.#closingDollars(2), true)) return;
    this.#take(width);
  }

  /** As in Pandoc: no space within the dollars, no letter or digit around them. */
  #singleDollar() {
    const start = this.#position + 1;
    if (SPACE.test(this.#text[start] ?? " ") || WORDY.test(this.#text[start - 2] ?? "")) return false;
    const end = this.#closingDollars(1);
    if (end < 0 || end - start > MAX_FORMULA_CHARACTERS) return false;
    const source = this.#text.slice(start, end);
    return !source.includes("\n") && !isProse(source) && this.#formula(1, end, false);
  }

  /** The position of the next dollars that may end a formula; -1 if there are none. */
  #closingDollars(width) {
    this.#dollars ??= closingDollars(this.#text);
    const places = this.#dollars.get(width);
    while (places.length && places.at(-1) <= this.#position) places.pop();
    return places.at(-1) ?? -1;
  }

  /** Reads the text up to `end`, between delimiters of this width, as a formula if it is one. */
  #formula(width, end, isDisplay) {
    const start = this.#position + width;
    if (end < 0 || end - start > MAX_FORMULA_CHARACTERS) return false;
    const source = this.#text.slice(start, end).trim();
    if (!source || source.includes("`") || NO_FORMULA_START.test(source)) return false;
    this.#append(formula(source, isDisplay), end + width - this.#position);
    return true;
  }

  #code() {
    const start = this.#position;
    let width = 1;
    while (this.#text[start + width] === "`") width += 1;
    const end = this.#closingTicks(start + width, width);
    if (end < 0) {
      this.#take(width);
      return;
    }
    let code = this.#text.slice(start + width, end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
    this.#append(element("code", {}, code), end + width - start);
  }

  #closingTicks(from, width) {
    if (!this.#lastTicks) {
      this.#lastTicks = new Map();
      for (const run of this.#text.matchAll(/`+/g)) this.#lastTicks.set(run[0].length, run.index);
    }
    if ((this.#lastTicks.get(width) ?? -1) < from) return -1;
    const runs = /`+/g;
    runs.lastIndex = from;
    for (let run = runs.exec(this.#text); run; run = runs.exec(this.#text)) {
      if (run[0].length === width) return run.index;
    }
    return -1;
  }

  #special() {
    const match = (pattern) => {
      pattern.lastIndex = this.#position;
      return pattern.exec(this.#text);
    };
    const char = this.#text[this.#position];
    const entity = char === "&" ? match(ENTITY) : null;
    const angle = char === "<" ? match(ANGLE_URL) : null;
    const breaks = char === "<" ? match(LINE_BREAK) : null;
    const follows = this.#position > 0 && /[\p{L}\p{N}_]/u.test(this.#text[this.#position - 1]);
    const bare = char === "h" && !follows && !this.#brackets.length ? match(BARE_URL) : null;
    if (entity) {
      this.#plain += decodedEntity(entity);
      this.#position += entity[0].length;
    } else if (angle && safeAddress(angle[1])) {
      this.#append(link(safeAddress(angle[1]), angle[1]), angle[0].length);
    } else if (breaks) {
      this.#append(element("br"), breaks[0].length);
    } else if (bare && safeAddress(withoutTail(bare[0]))) {
      const text = withoutTail(bare[0]);
      this.#append(link(safeAddress(text), text), text.length);
    } else {
      this.#take(1);
    }
  }

  #lineEnd() {
    const isHard = this.#plain.endsWith("  ");
    this.#plain = this.#plain.trimEnd();
    if (isHard) this.#append(element("br"), 1);
    else this.#take(1);
  }

  #delimiter(char) {
    const start = this.#position;
    let width = 1;
    while (this.#text[start + width] === char) width += 1;
    if (char === "~" && width !== 2) {
      this.#take(width);
      return;
    }
    const before = this.#text[start - 1] ?? " ";
    const after = this.#text[start + width] ?? " ";
    const opens = !SPACE.test(after) && (!PUNCTUATION.test(after) || isEdge(before));
    const closes = !SPACE.test(before) && (!PUNCTUATION.test(before) || isEdge(after));
    const isWordy = char === "_";
    const node = document.createTextNode(this.#text.slice(start, start + width));
    this.#append(node, width);
    this.#delimiters.push({
      char,
      node,
      width,
      original: width,
      opens: opens && (!isWordy || !closes || PUNCTUATION.test(before)),
      closes: closes && (!isWordy || !opens || PUNCTUATION.test(after)),
    });
  }

  #openBracket(width) {
    const node = document.createTextNode(this.#text.slice(this.#position, this.#position + width));
    this.#append(node, width);
    this.#brackets.push({ node, start: this.#position, delimiters: this.#delimiters.length });
  }

  #closeBracket() {
    const bracket = this.#brackets.pop();
    const target = bracket ? linkTarget(this.#text, this.#position + 1) : null;
    if (!target) {
      this.#take(1);
      return;
    }
    this.#flush();
    this.#pairEmphasis(bracket.delimiters);
    const address = safeAddress(target.address);
    const label = this.#text.slice(bracket.start, this.#position);
    const node = address ? link(address, "") : element("span");
    moveBetween(bracket.node, null, node);
    if (address && !node.textContent.trim()) node.textContent = label || address;
    this.#depths.set(node, this.#depthWithin(node) + 1);
    bracket.node.replaceWith(node);
    this.#position = target.end;
    this.#brackets.length = 0; // A link holds no links, so nothing before it can be around it.
  }

  /** Pairs the delimiters from `bottom` up into elements and forgets them. */
  #pairEmphasis(bottom) {
    const runs = this.#delimiters;
    const floors = new Map(); // for a kind of closer, the index below which it has no opener
    const open = []; // indices of runs that may still open
    for (let i = bottom; i < runs.length; i += 1) {
      const closer = runs[i];
      while (closer.closes && closer.width > 0) {
        const sort = `${closer.char}${closer.opens}${closer.original % 3}`;
        const at = findOpener(runs, open, closer, floors.get(sort) ?? 0);
        if (at < 0) {
          floors.set(sort, open.length);
          break;
        }
        open.length = at + 1;
        if (!this.#wrap(runs[open[at]], closer)) {
          // What is too deep lies behind every run that is still open: none of them can pair again.
          open.length = 0;
          floors.clear();
          break;
        }
        if (runs[open[at]].width === 0) open.pop();
        for (const [name, floor] of floors) floors.set(name, Math.min(floor, open.length));
      }
      if (closer.opens && closer.width > 0) open.push(i);
    }
    runs.length = bottom;
  }

  #wrap(opener, closer) {
    const isStrong = opener.width >= 2 && closer.width >= 2;
    const tag = opener.char === "~" ? "del" : isStrong ? "strong" : "em";
    const width = opener.char === "~" || isStrong ? 2 : 1;
    const node = element(tag);
    const range = depthBetween(opener.node, closer.node, this.#depths);
    if (range >= MAX_NESTING) return false;
    moveBetween(opener.node, closer.node, node);
    opener.node.after(node);
    this.#depths.set(node, range + 1);
    for (const run of [opener, closer]) {
      run.width -= width;
      run.node.data = run.char.repeat(run.width);
    }
    return true;
  }

  #depthWithin(node) {
    return Math.max(0, ...Array.from(node.children, (child) => this.#depths.get(child) ?? 0));
  }
}

/** The dollars that may end a formula, by their number; the first of them is last. */
function closingDollars(text) {
  const places = new Map([[1, []], [2, []]]);
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === "\\") i += 1; // what follows is escaped
    else if (text[i] === "$") i = addDollars(text, i, places);
  }
  for (const found of places.values()) found.reverse();
  return places;
}

/** Notes a run of dollars if it may end a formula; the position of its last one. */
function addDollars(text, start, places) {
  let end = start;
  while (text[end + 1] === "$") end += 1;
  const width = end + 1 - start;
  if (width === 2 || (width === 1 && closesFormula(text, start))) places.get(width).push(start);
  return end;
}

function closesFormula(text, at) {
  if (at === 0 || SPACE.test(text[at - 1])) return false;
  return !WORDY.test(text[at + 1] ?? "") || ORDINAL.test(text.slice(at + 1, at + 4));
}

/** Whether dollars belong to prices: a number with words after it is between them. */
function isProse(source) {
  if (!/^\d/.test(source)) return false;
  const plain = source.replace(/\\[a-zA-Z]+(?:\{[^{}]*\})?/g, " ");
  return /(?:^|[\s,.(])\p{L}{2,}(?=[\s,.;:!?)]|$)/u.test(plain);
}

function isEdge(char) {
  return SPACE.test(char) || PUNCTUATION.test(char);
}

function findOpener(runs, open, closer, floor) {
  for (let at = open.length - 1; at >= floor; at -= 1) {
    const opener = runs[open[at]];
    if (opener.char !== closer.char) continue;
    // CommonMark's rule of three keeps ** from pairing with a part of ***.
    const isOdd =
      (opener.closes || closer.opens) &&
      (opener.original + closer.original) % 3 === 0 &&
      (opener.original % 3 !== 0 || closer.original % 3 !== 0);
    if (!isOdd) return at;
  }
  return -1;
}

function depthBetween(first, last, depths) {
  let depth = 0;
  for (let node = first.nextSibling; node && node !== last; node = node.nextSibling) {
    depth = Math.max(depth, depths.get(node) ?? 0);
  }
  return depth;
}

function moveBetween(first, last, target) {
  while (first.nextSibling && first.nextSibling !== last) target.append(first.nextSibling);
}

function link(address, text) {
  const properties = { href: address, target: "_blank", rel: "noopener noreferrer" };
  return element("a", { ...properties, title: address }, text);
}

/** Reads "(address "title")" at a position; {address, end} or null. */
function linkTarget(text, from) {
  if (text[from] !== "(") return null;
  let depth = 0;
  let end = from + 1;
  for (; end < text.length && end - from < MAX_TARGET_CHARACTERS; end += 1) {
    const char = text[end];
    if (char === "\\") end += 1;
    else if (char === "\n") return null;
    else if (char === "(") depth += 1;
    else if (char === ")" && depth === 0) break;
    else if (char === ")") depth -= 1;
  }
  if (text[end] !== ")") return null;
  const inner = text.slice(from + 1, end).trim();
  const parts = /^(?:<([^<>]*)>|(\S*))(?:\s+["'(].*)?$/.exec(inner);
  return parts ? { address: (parts[1] ?? parts[2]).replace(/\\(.)/g, "$1"), end: end + 1 } : null;
}

/** Punctuation after a bare address belongs to the sentence; a bracket only if it is not closed. */
function withoutTail(address) {
  let end = address.length;
  let surplus = count(address, ")") - count(address, "(");
  for (; end > 0; end -= 1) {
    const char = address[end - 1];
    if (char === ")" && surplus > 0) surplus -= 1;
    else if (!".,;:!?'*_~]}".includes(char)) break;
  }
  return address.slice(0, end);
}

function count(text, char) {
  return text.split(char).length - 1;
}

function decodedEntity([whole, decimal, hexadecimal, name]) {
  if (name) return NAMED[name];
  const code = decimal ? Number.parseInt(decimal, 10) : Number.parseInt(hexadecimal, 16);
  const isCharacter = code > 0 && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
  return isCharacter ? String.fromCodePoint(code) : whole;
}
